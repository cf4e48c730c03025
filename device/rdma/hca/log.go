// Side: data

package hca

// warn logs a mistake of the guest. Any thread; it is not for the data path, only
// for events that stop an object or refuse a command. The log limits its lines.
func (d *dataSide) warn(msg string, args ...any) { d.log.Warn(msg, args...) }
