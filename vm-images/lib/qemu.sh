# shellcheck shell=bash
# A QEMU with the user-creatable generic vhost-user device (called vhost-user-test-device-pci since 10.2), and those of
# other Debian releases, which have ivshmem-doorbell only. With the latter `hca: auto` takes that.

QEMU_DEVICE=vhost-user-test-device-pci
QEMU_RELEASES=(bookworm trixie)

# qemu_dir [SUITE]: without SUITE of the one with the device.
qemu_dir() {
	echo "$CACHE/qemu-${1:+$1-}$(recipe_hash "$MIRROR" -- "$HERE/lib/bootstrap.sh" "$HERE/lib/qemu.sh")"
}

qemu_has_device() { [[ $("$1" -device help 2>/dev/null) == *"\"${2:-$QEMU_DEVICE}\""* ]]; }

# qemu_usable QEMU: whether VMs can have an HCA with it.
qemu_usable() {
	qemu_has_device "$1" && return
	local version
	version=$("$1" --version | sed -n 's/^QEMU emulator version \([0-9]*\.[0-9]*\).*/\1/p')
	[[ -n $version && $(printf '%s\n' 9.2 "$version" | sort -V | head -1) == 9.2 ]] &&
		qemu_has_device "$1" ivshmem-doorbell
}

# qemu_find: sets QEMU and QEMU_IMG if there is a usable QEMU.
qemu_find() {
	QEMU='' QEMU_IMG=''
	if [[ -n ${VNICD_QEMU:-} ]]; then
		qemu_usable "$VNICD_QEMU" ||
			die "VNICD_QEMU=$VNICD_QEMU cannot have an HCA: it must be QEMU 9.2 or newer with ivshmem-doorbell, or have $QEMU_DEVICE"
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

# qemu_release_build SUITE: the QEMU of another Debian release.
qemu_release_build() {
	local suite
	for suite in "${QEMU_RELEASES[@]}"; do
		[[ $suite != "$1" ]] || {
			need_root qemu
			need_bootstrap
			artifact "$(qemu_dir "$suite")" "QEMU from $suite" "qemu_recipe_$suite"
			return
		}
	done
	die "no QEMU of $1: one of ${QEMU_RELEASES[*]}"
}

qemu_recipe_bookworm() {
	qemu_unpack "$1" bookworm bookworm "$(qemu_dir bookworm)"
	rm "$1/try"
}

qemu_recipe_trixie() {
	qemu_unpack "$1" trixie trixie "$(qemu_dir trixie)"
	rm "$1/try"
}

qemu_recipe() {
	qemu_unpack "$1" trixie trixie-backports "$(qemu_dir)"
	qemu_has_device "$1/try" || die "the QEMU of trixie-backports has no $QEMU_DEVICE"
	rm "$1/try"
}

# qemu_unpack TMP SUITE FROM FINAL: QEMU in TMP, later FINAL, and TMP/try, which runs it there.
qemu_unpack() {
	local tmp=$1 final=$4 tool
	bootstrap "$2" "$tmp/root" apt libc6 \
		--customize-hook="chroot \"\$1\" apt-get install -y -t $3 qemu-system-x86 qemu-utils"
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
}
