package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// An image has the daemon alone, which needs no other file: one layer, and the documents that the OCI's image
// specification 1.1 asks for, as an archive of an image layout, which podman, skopeo and others load.

// Media types of that specification.
const (
	mediaIndex    = "application/vnd.oci.image.index.v1+json"
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// ociBlob describes content by its sum (descriptor.md).
type ociBlob struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"` // bytes
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *ociPlatform      `json:"platform,omitempty"`
}

type ociPlatform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// ociIndex is index.json (image-index.md).
type ociIndex struct {
	SchemaVersion int       `json:"schemaVersion"`
	MediaType     string    `json:"mediaType"`
	Manifests     []ociBlob `json:"manifests"`
}

// ociManifest names an image's parts (manifest.md).
type ociManifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Config        ociBlob           `json:"config"`
	Layers        []ociBlob         `json:"layers"`
	Annotations   map[string]string `json:"annotations"`
}

// ociConfig says how a container starts (config.md).
type ociConfig struct {
	ociPlatform
	Created time.Time    `json:"created"`
	Config  ociExecution `json:"config"`
	RootFS  struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

type ociExecution struct {
	Entrypoint []string          `json:"Entrypoint"`
	Cmd        []string          `json:"Cmd"`
	Labels     map[string]string `json:"Labels"`
}

// image writes the image of the host's program for an architecture.
func (b *builder) image(s *spec, arch, dir string) error {
	layer, err := b.layer(s)
	if err != nil {
		return err
	}
	compressed, err := zip(layer)
	if err != nil {
		return err
	}
	labels := map[string]string{
		"org.opencontainers.image.title":    "vnicd",
		"org.opencontainers.image.version":  b.version.git,
		"org.opencontainers.image.source":   "https://github.com/vnicd/vnicd",
		"org.opencontainers.image.licenses": "Apache-2.0",
		"org.opencontainers.image.created":  b.time.Format(time.RFC3339),
	}
	config := ociConfig{ociPlatform: ociPlatform{arch, "linux"}, Created: b.time,
		Config: ociExecution{[]string{"/usr/bin/vnicd"}, []string{"run", "--keep"}, labels}}
	config.RootFS.Type, config.RootFS.DiffIDs = "layers", []string{digest(layer)}

	l := ociLayout{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	manifest := l.add(mediaManifest, encode(ociManifest{2, mediaManifest, l.add(mediaConfig, encode(config)),
		[]ociBlob{l.add(mediaLayer, compressed)}, labels}))
	manifest.Platform = &config.ociPlatform
	manifest.Annotations = map[string]string{"org.opencontainers.image.ref.name": b.version.imageName()}
	l["index.json"] = encode(ociIndex{2, mediaIndex, []ociBlob{manifest}})

	path := filepath.Join(dir, fmt.Sprintf("vnicd-%s-linux-%s.oci.tar", b.version.pkg(), arch))
	if err := archiveFiles(l).write(path, b.time); err != nil {
		return err
	}
	fmt.Println(path)
	return nil
}

// encode returns one of the documents above as JSON.
func encode(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // they have strings, numbers and times
	}
	return text
}

// ociLayout has the files of an image layout by their paths (image-layout.md).
type ociLayout map[string][]byte

// add puts content where its sum says.
func (l ociLayout) add(mediaType string, data []byte) ociBlob {
	blob := ociBlob{MediaType: mediaType, Digest: digest(data), Size: len(data)}
	l["blobs/"+strings.ReplaceAll(blob.Digest, ":", "/")] = data
	return blob
}

// imageName returns the name by which a loaded image is known. A tag has no "~" and no "+".
func (v version) imageName() string { return "vnicd:" + strings.TrimPrefix(v.git, "v") }

// inImage are the host's files that a container needs, or must have for their licences, as prefixes of paths.
var inImage = []string{"/usr/bin/", "/usr/libexec/vnicd/", "/etc/vnicd/vnicd.yaml", "/etc/vnicd/vnicd.d",
	"/usr/share/doc/vnicd/copyright", "/usr/share/doc/vnicd/third-party-licences.txt", "/usr/share/licenses/vnicd/"}

// layer returns an archive of the files that an image has. They have the paths and modes of the packages.
func (b *builder) layer(s *spec) ([]byte, error) {
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	contents := []content{
		{Path: "/run/vnicd", Type: "dir", Info: &fileInfo{0o755}}, // sockets, to be shared with the host
		{Path: "/tmp", Type: "dir", Info: &fileInfo{0o1777}},      // the keeper's own socket
	}
	for _, c := range s.contents {
		if slices.ContainsFunc(inImage, func(p string) bool { return strings.HasPrefix(c.Path, p) }) {
			contents = append(contents, c)
		}
	}
	for _, c := range contents {
		if err := b.archive(w, ".", c); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return data.Bytes(), err
}

func digest(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }
