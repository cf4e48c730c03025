# shellcheck shell=bash
# The guest: kernel, a small initramfs and an ext4 root disk, all from Debian packages. Some releases have a kernel that
# kernel.sh compiles.

guest_packages() {
	sed 's/#.*//' "$HERE/guest/packages"
	tr ', ' '\n\n' <<<"$PACKAGES" | sort -u
}

guest_dir() {
	echo "$CACHE/guest-$RELEASE-$(recipe_hash "$RELEASE" "$MIRROR" "$(guest_packages)" "$(kernel_hash)" -- "$HERE/guest" "$HERE/lib/bootstrap.sh" "$HERE/lib/guest.sh")"
}

guest_build() {
	local dir
	suite_of "$RELEASE" >/dev/null
	dir=$(guest_dir)
	artifact_ready "$dir" && return 0
	need_root guest
	kernel_build
	need_bootstrap mke2fs=e2fsprogs cpio=cpio xz=xz-utils modprobe=kmod
	artifact "$dir" "guest image ($RELEASE${PACKAGES:+, with $PACKAGES})" guest_recipe
}

guest_recipe() {
	local tmp=$1 root=$1/root kver suite include own
	suite=$(suite_of "$RELEASE")
	include=$(guest_packages | grep . | paste -sd,)
	own=$(kernel_dir)
	# The archive may drop the headers once a newer kernel is out, and a module must match its kernel exactly.
	local kernel=(--include=linux-image-amd64) headers=(
		--customize-hook='mkdir -p "$1/headers" && chroot "$1" sh -ec "
			cd /headers
			kver=\$(ls /lib/modules | sort -V | tail -n 1)
			apt-get download linux-headers-\$kver \$(apt-cache depends --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances linux-headers-\$kver |
				sed -n \"s/^ *Depends: \\(linux-.*\\)/\\1/p\" | grep -v linux-image | sort -u)"'
	)
	if [[ -n $own ]]; then
		kernel=() headers=()
	elif [[ $RELEASE == *-backports ]]; then
		kernel=(--customize-hook="chroot \"\$1\" apt-get install -y -t $RELEASE linux-image-amd64")
	fi
	# The stock initrd is not used: building it takes longer than everything else.
	# rdma-core ships its tests of verbs as documentation.
	bootstrap "$suite" "$root" minbase "$include" \
		--dpkgopt='path-include=/usr/share/doc/rdma-core/tests/*' \
		--setup-hook='mkdir -p "$1/etc/initramfs-tools" && echo "update_initramfs=no" >"$1/etc/initramfs-tools/update-initramfs.conf"' \
		"${kernel[@]}" "${headers[@]}"

	if [[ -n $own ]]; then
		mkdir -p "$root/lib/modules"
		cp -r "$own/modules/." "$root/lib/modules/"
		cp "$own/vmlinuz" "$root/boot/vmlinuz-$(ls "$own/modules")"
	fi
	kver=$(ls "$root/lib/modules" | sort -V | tail -n 1)
	echo "$kver" >"$tmp/kver"
	[[ -n $own ]] || mv "$root/headers" "$tmp/headers"
	cp "$root/boot/vmlinuz-$kver" "$tmp/vmlinuz"
	dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Package} ${Version}\n' >"$tmp/packages.txt"

	cp -r "$HERE/guest/files/." "$root/"
	chmod 755 "$root"/usr/lib/vnicd/*
	mkdir -p "$root/host"
	rm -rf "${root:?}"/boot/* "${root:?}"/var/cache/apt/* "${root:?}"/var/lib/apt/lists/*
	: >"$root/etc/machine-id"
	rm -f "$root"/etc/resolv.conf "$root"/etc/hostname "$root"/etc/ssh/ssh_host_* # keys would be the same in all guests
	printf '127.0.0.1 localhost\n::1 localhost ip6-localhost\n' >"$root/etc/hosts"
	passwd --root "$root" -d root
	guest_initramfs "$root" "$kver" "$tmp"

	# No journal: the disk is never written back (see README.md), and replaying one costs boot time.
	local kib
	kib=$(du -sk --apparent-size "$root" | cut -f1)
	truncate -s $((kib * 5 / 4 + 262144))K "$tmp/rootfs.ext4"
	mke2fs -q -t ext4 -O ^has_journal,^metadata_csum -m 0 -E lazy_itable_init=1,nodiscard -L vnicd -d "$root" "$tmp/rootfs.ext4"
	rm -rf --one-file-system "$root"
}

# guest_initramfs ROOT KVER OUT: busybox and the few modules that the root disk needs. The stock initrd is twenty times
# as big, and under emulation unpacking it takes most of the boot.
guest_initramfs() {
	local root=$1 kver=$2 out=$3 ird=$3/initramfs m f
	mkdir -p "$ird"/{bin,dev,proc,sys,newroot,modules}
	cp "$root/bin/busybox" "$ird/bin/busybox"
	cp "$HERE/guest/initramfs-init" "$ird/init"
	chmod 755 "$ird/init"
	: >"$ird/modules/order" # it stays empty if the kernel has all of them built in
	for m in virtio_pci virtio_blk virtio_console ext4; do
		# crc32c is requested by name at run time (softdep), so modprobe does not list it.
		[[ $m == ext4 ]] && modprobe -d "$root" -S "$kver" --show-depends crc32c_generic 2>/dev/null || true
		modprobe -d "$root" -S "$kver" --show-depends "$m"
	done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r f; do
		case $f in
		*.xz) xz -dc "$f" >"$ird/modules/$(basename "$f" .xz)" ;;
		*.zst) zstd -qdc "$f" >"$ird/modules/$(basename "$f" .zst)" ;;
		*) cp "$f" "$ird/modules/" ;;
		esac
		f=$(basename "$f")
		echo "${f%.ko*}.ko" >>"$ird/modules/order"
	done
	(cd "$ird" && find . | LC_ALL=C sort | cpio -o -H newc --owner=0:0 --quiet) >"$out/initrd"
	cat "$ird/modules/order"
	rm -rf "$ird"
}
