/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of errors, one per thread. */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"
#include "transport.h"

static _Thread_local char formatted[256];
static _Thread_local const char *last = "";

EXPORT const char *vnicd_error(void)
{
	return last;
}

int set_error(int code, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(formatted, sizeof(formatted), format, args);
	va_end(args);
	last = formatted;
	return code;
}

int set_error_text(int code, const char *text)
{
	last = text;
	return code;
}

EXPORT const char *vnicd_wc_status_text(uint32_t status)
{
	static const char *const names[] = VNICD_WC_STATUS_NAMES;

	return status < sizeof(names) / sizeof(names[0]) ? names[status] : "unknown completion status";
}
