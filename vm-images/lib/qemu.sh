# shellcheck shell=bash
# A QEMU with the user-creatable generic vhost-user device (called vhost-user-test-device-pci since 10.2).

QEMU_DEVICE=vhost-user-test-device-pci

qemu_dir() { echo "$CACHE/qemu-$(recipe_hash "$MIRROR" -- "$HERE/lib/bootstrap.sh" "$HERE/lib/qemu.sh")"; }

qemu_has_device() { "$1" -device help 2>/dev/null | grep -q "\"$QEMU_DEVICE\""; }

# qemu_find: sets QEMU and QEMU_IMG if there is a usable QEMU.
qemu_find() {
	QEMU='' QEMU_IMG=''
	if [[ -n ${VNICD_QEMU:-} ]]; then
		qemu_has_device "$VNICD_QEMU" ||
			die "VNICD_QEMU=$VNICD_QEMU has no device $QEMU_DEVICE: it must be QEMU 10.2 or newer (Debian: qemu-system-x86 from trixie-backports)"
		QEMU=$VNICD_QEMU
		QEMU_IMG=$(command -v qemu-img || true)
		return 0
	fi
	local own
	if own=$(command -v qemu-system-x86_64) && qemu_has_device "$own"; then
		QEMU=$own
		QEMU_IMG=$(command -v qemu-img || true)
		return 0
	fi
	local dir
	dir=$(qemu_dir)
	artifact_ready "$dir" || return 1
	QEMU=$dir/qemu-system-x86_64 QEMU_IMG=$dir/qemu-img
}

qemu_build() {
	if qemu_find; then return 0; fi
	need_root qemu
	need_bootstrap
	artifact "$(qemu_dir)" "QEMU from trixie-backports" qemu_recipe
	qemu_find
}

qemu_recipe() {
	local tmp=$1 final tool
	final=$(qemu_dir)
	bootstrap trixie "$tmp/root" apt libc6 \
		--customize-hook='chroot "$1" apt-get install -y -t trixie-backports qemu-system-x86 qemu-utils'
	rm -rf "$tmp"/root/var/{cache,lib/apt} "$tmp"/root/usr/share/{doc,info,zoneinfo,perl}
	for tool in qemu-system-x86_64 qemu-img; do
		# That root's loader runs the program, so the host's C library does not matter.
		cat >"$tmp/$tool" <<-W
			#!/bin/sh
			r='$final/root'
			export QEMU_MODULE_DIR="\$r/usr/lib/x86_64-linux-gnu/qemu"
			exec "\$r/lib64/ld-linux-x86-64.so.2" --argv0 $tool --library-path "\$r/usr/lib/x86_64-linux-gnu" "\$r/usr/bin/$tool" FLAGS "\$@"
		W
		chmod 755 "$tmp/$tool"
	done
	sed -i 's| FLAGS | -L "$r/usr/share/qemu" -L "$r/usr/share/seabios" |' "$tmp/qemu-system-x86_64"
	sed -i 's| FLAGS | |' "$tmp/qemu-img"
	# Test the program under its temporary name before it gets the final one.
	sed "s|^r=.*|r='$tmp/root'|" "$tmp/qemu-system-x86_64" >"$tmp/try"
	chmod 755 "$tmp/try"
	"$tmp/try" --version
	qemu_has_device "$tmp/try" || die "the QEMU of trixie-backports has no $QEMU_DEVICE"
	rm "$tmp/try"
}
