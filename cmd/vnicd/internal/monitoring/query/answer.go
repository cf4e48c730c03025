package query

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// An answer is a head, frames of its text, and an end. Each begins with a length of four bytes, little-endian:
//
//	head     length of the rest; status of two bytes; content type
//	frame    length from 1 to maxFrame; text
//	end      0, or aborted: the text is not complete
const (
	maxFrame = 32 << 10
	maxHead  = 256
	aborted  = 1<<32 - 1
)

// Writer sends an answer, as an http.ResponseWriter, so that Go's handlers can make it. Of its header only the content
// type is sent.
type Writer struct {
	conn   net.Conn
	within time.Duration
	header http.Header
	// buf has a frame with its length, of which 4+n bytes are in use. The head is sent with the first frame.
	buf  []byte
	sent bool
	err  error
}

// NewWriter returns the writer of an answer, which has to be read within a time from when its first bytes are sent.
func NewWriter(conn net.Conn, within time.Duration) *Writer {
	return &Writer{conn: conn, within: within, header: http.Header{}}
}

// Header implements http.ResponseWriter.
func (w *Writer) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *Writer) WriteHeader(status int) {
	if w.sent || w.err != nil {
		return
	}
	w.sent = true
	kind := w.header.Get("Content-Type")
	kind = kind[:min(len(kind), maxHead-2)]
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, 6+len(kind)), uint32(2+len(kind)))
	b = append(binary.LittleEndian.AppendUint16(b, uint16(status)), kind...)
	if w.err = w.conn.SetWriteDeadline(time.Now().Add(w.within)); w.err == nil {
		_, w.err = w.conn.Write(b)
	}
}

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (n int, err error) {
	w.WriteHeader(http.StatusOK)
	for len(p) > 0 && w.err == nil {
		if w.buf == nil {
			w.buf = make([]byte, 4, 4+maxFrame)
		}
		k := min(len(p), cap(w.buf)-len(w.buf))
		w.buf, p, n = append(w.buf, p[:k]...), p[k:], n+k
		if len(w.buf) == cap(w.buf) {
			w.flush()
		}
	}
	return n, w.err
}

// flush sends what Write has gathered.
func (w *Writer) flush() {
	if len(w.buf) <= 4 || w.err != nil {
		return
	}
	binary.LittleEndian.PutUint32(w.buf, uint32(len(w.buf)-4))
	_, w.err = w.conn.Write(w.buf)
	w.buf = w.buf[:4]
}

// Flush implements http.Flusher.
func (w *Writer) Flush() {
	w.WriteHeader(http.StatusOK)
	w.flush()
}

// Close ends the answer, incomplete if why is not nil. Its error is that of the connection, on which nothing can follow
// then.
func (w *Writer) Close(why error) error {
	end := uint32(0)
	if why != nil {
		if end = aborted; !w.sent {
			end = 0
			http.Error(w, why.Error(), http.StatusInternalServerError)
		}
	}
	w.Flush()
	if w.err == nil {
		_, w.err = w.conn.Write(binary.LittleEndian.AppendUint32(nil, end))
	}
	return w.err
}

// ErrAborted is the error of reading an answer that the daemon could not complete.
var ErrAborted = errors.New("the daemon did not complete its answer")

// Answer is an answer that is being read.
type Answer struct {
	Status      int
	ContentType string

	conn io.Reader
	left int // of the present frame
	end  error
}

// ReadAnswer reads the head of an answer.
func ReadAnswer(conn io.Reader) (*Answer, error) {
	n, err := length(conn)
	if err != nil {
		return nil, err
	}
	if n < 2 || n > maxHead {
		return nil, fmt.Errorf("malformed answer: a head of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(conn, b); err != nil {
		return nil, err
	}
	a := &Answer{Status: int(binary.LittleEndian.Uint16(b)), ContentType: string(b[2:]), conn: conn}
	if a.Status < 200 || a.Status > 599 {
		return nil, fmt.Errorf("malformed answer: status %d", a.Status)
	}
	return a, nil
}

func length(conn io.Reader) (uint32, error) {
	var b [4]byte
	_, err := io.ReadFull(conn, b[:])
	return binary.LittleEndian.Uint32(b[:]), err
}

// Read implements io.Reader. After io.EOF or ErrAborted the next answer may follow on the connection; every other error
// is the connection's end.
func (a *Answer) Read(p []byte) (int, error) {
	if a.end != nil || len(p) == 0 {
		return 0, a.end
	}
	if a.left == 0 {
		n, err := length(a.conn)
		switch {
		case err != nil:
			a.end = unexpected(err)
		case n == 0:
			a.end = io.EOF
		case n == aborted:
			a.end = ErrAborted
		case n > maxFrame:
			a.end = fmt.Errorf("malformed answer: a frame of %d bytes", n)
		}
		if a.left = int(n); a.end != nil {
			return 0, a.end
		}
	}
	n, err := a.conn.Read(p[:min(len(p), a.left)])
	if a.left -= n; err != nil {
		a.end = unexpected(err)
	}
	return n, a.end
}

// unexpected makes the connection's end in the middle of an answer an error.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Drain reads the rest of an answer, so that the next one can follow. Its error is the connection's end.
func (a *Answer) Drain() error {
	if _, err := io.Copy(io.Discard, a); err != nil && !errors.Is(err, ErrAborted) {
		return err
	}
	return nil
}
