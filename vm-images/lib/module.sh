# shellcheck shell=bash
# The build root: the guest's release with its compiler, libibverbs and the headers of exactly the guest's kernel.

module_dir() {
	local guest kver=none
	guest=$(guest_dir)
	artifact_ready "$guest" && kver=$(cat "$guest/kver")
	echo "$CACHE/module-$RELEASE-$(recipe_hash "$RELEASE" "$MIRROR" "$kver" -- "$HERE/lib/bootstrap.sh" "$HERE/lib/module.sh")"
}

module_root_build() {
	local dir
	dir=$(module_dir)
	artifact_ready "$dir" && return 0
	need_root "the build root"
	need_bootstrap
	artifact "$dir" "build root ($RELEASE, kernel $(cat "$(guest_dir)/kver"))" module_recipe
}

module_recipe() {
	local tmp=$1 deb
	bootstrap "$(suite_of "$RELEASE")" "$tmp/root" minbase make,gcc,libc6-dev,libelf1,libibverbs-dev,libssl3,pahole,sparse
	# Unpacked, not installed: as a package the headers depend on the kernel image, which is 300 MB of no use here.
	for deb in "$(guest_dir)"/headers/*.deb; do
		# Debian 12 ships /lib/modules where /lib is a link by now: tar must follow it, not replace it.
		dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$tmp/root"
	done
	rm -rf "$tmp"/root/var/{cache,lib/apt}
	cp "$(guest_dir)/kver" "$tmp/kver"
}

# module_compile SRC OUT
module_compile() {
	local src=$1 out=$2 dir kver work rc=0
	[[ -d $src ]] || die "no directory '$src' with the module's source"
	[[ -e $src/Kbuild || -e $src/Makefile ]] || die "'$src' has neither Kbuild nor Makefile"
	need_root "a module"
	dir=$(module_dir)
	kver=$(cat "$dir/kver")
	# A copy inside the root: nothing is mounted, nothing is left in the source tree, and builds may run side by side.
	work=$(mktemp -d "$dir/root/build.XXXXXX")
	cp -rL "$src/." "$work/"
	find "$work" \( -name '*.o' -o -name '*.ko' -o -name '*.mod' -o -name '*.mod.c' -o -name '.*.cmd' \) -delete
	# /proc, in a mount namespace that goes with the command: objtool of recent kernels reads its stack limit there.
	unshare --mount sh -ec 'mount -t proc proc "$0/proc"; exec chroot "$@"' "$dir/root" "$dir/root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ \
		make -C "/lib/modules/$kver/build" M="/${work##*/}" -j"$(nproc)" CONFIG_DEBUG_INFO_BTF_MODULES= \
		${W:+W="$W"} ${C:+C="$C"} ${WERROR:+KCFLAGS=-Werror} modules >&2 || rc=$?
	if ((rc == 0)) && [[ ! -e $work/vnicd.ko ]]; then
		say "the build made no vnicd.ko but: $(cd "$work" && ls -- *.ko 2>/dev/null | tr '\n' ' ')"
		rc=1
	fi
	if ((rc == 0)); then
		mkdir -p "$out"
		cp "$work/vnicd.ko" "$out/.vnicd.ko.$$" && mv "$out/.vnicd.ko.$$" "$out/vnicd.ko" || rc=$?
	fi
	rm -rf --one-file-system "$work"
	((rc == 0)) || die "compiling the module in $src for $kver failed"
	say "built $out/vnicd.ko for $kver"
}

# programs_compile SRC OUT: user-space programs for the guest.
programs_compile() {
	local src=$1 out=$2 dir work rc=0
	[[ -e $src/Makefile ]] || die "'$src' has no Makefile"
	need_root "programs for the guest"
	dir=$(module_dir)
	work=$(mktemp -d "$dir/root/build.XXXXXX")
	cp -rL "$src/." "$work/"
	mkdir "$work/.out"
	chroot "$dir/root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ \
		make -C "/${work##*/}" -j"$(nproc)" OUT=.out >&2 || rc=$?
	if ((rc == 0)); then
		mkdir -p "$out"
		cp -r "$work/.out/." "$out/" || rc=$?
	fi
	rm -rf --one-file-system "$work"
	((rc == 0)) || die "compiling the programs in $src failed"
}
