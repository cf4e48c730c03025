package guestdrv

import "embed"

// ModuleSource has the source of the guest's kernel module, in its folder linux, for programs that compile it without
// the source tree. It is complete: the module needs nothing else but the headers of its kernel. The files are licensed
// under GPL-2.0 (linux/COPYING).
//
//go:embed linux/Kbuild linux/Makefile linux/COPYING linux/*.c linux/*.h
var ModuleSource embed.FS
