# shellcheck shell=bash
# Compiling in the build root. Not part of the root's hash: a change here does not change the root.

# in_root ROOT COMMAND...: runs COMMAND in ROOT with /dev, which a root made in a user namespace lacks, and /proc, where
# objtool of recent kernels reads its stack limit. Its mount namespace ends with COMMAND.
in_root() {
	unshare --mount sh -ec 'mount --rbind /dev "$0/dev"; mount --rbind /proc "$0/proc"; exec chroot "$0" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ "$@"' "$@"
}

# module_compile SRC OUT
module_compile() {
	local src=$1 out=$2 dir kver work ko rc=0
	[[ -d $src ]] || die "no directory '$src' with the module's source"
	[[ -e $src/Kbuild || -e $src/Makefile ]] || die "'$src' has neither Kbuild nor Makefile"
	need_root "a module"
	dir=$(module_dir)
	kver=$(cat "$dir/kver")
	# Copied into the root: no mounts, nothing left in the source tree, and builds can run in parallel.
	work=$(mktemp -d "$dir/root/build.XXXXXX")
	cp -rL "$src/." "$work/"
	find "$work" \( -name '*.o' -o -name '*.ko' -o -name '*.mod' -o -name '*.mod.c' -o -name '.*.cmd' \) -delete
	in_root "$dir/root" make -C "/lib/modules/$kver/build" M="/${work##*/}" -j"$(nproc)" CONFIG_DEBUG_INFO_BTF_MODULES= \
		${W:+W="$W"} ${C:+C="$C"} ${WERROR:+KCFLAGS=-Werror} ${WERROR:+${C:+CF=-Wsparse-error}} modules >&2 || rc=$?
	ko=$(cd "$work" && ls -- *.ko 2>/dev/null | tr '\n' ' ')
	ko=${ko% }
	if ((rc == 0)) && [[ -z $ko || $ko == *' '* ]]; then
		say "the build should have made one module. It made: ${ko:-none}"
		rc=1
	fi
	if ((rc == 0)); then
		mkdir -p "$out"
		cp "$work/$ko" "$out/.$ko.$$" && mv "$out/.$ko.$$" "$out/$ko" || rc=$?
	fi
	rm -rf --one-file-system "$work"
	((rc == 0)) || die "compiling the module in $src for $kver failed"
	say "built $out/$ko for $kver"
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
	in_root "$dir/root" make -C "/${work##*/}" -j"$(nproc)" OUT=.out >&2 || rc=$?
	if ((rc == 0)); then
		mkdir -p "$out"
		cp -r "$work/.out/." "$out/" || rc=$?
	fi
	rm -rf --one-file-system "$work"
	((rc == 0)) || die "compiling the programs in $src failed"
}
