# shellcheck shell=bash
# Kernels with the checks that Debian's lack, for RELEASE=trixie-debug and trixie-kcsan: from the release's linux-source
# and compiler, with a configuration for these guests (kernel/*.config).

# kernel_flavour: debug, kcsan, or nothing if the guest has Debian's kernel.
kernel_flavour() {
	case $RELEASE in
	trixie-debug | trixie-kcsan) echo "${RELEASE#trixie-}" ;;
	esac
}

# kernel_options: the files that make the configuration. The tests that use KCSAN need no kernel users.
kernel_options() {
	case $(kernel_flavour) in
	debug) printf '%s\n' "$HERE"/kernel/{base,users,debug}.config ;;
	kcsan) printf '%s\n' "$HERE"/kernel/{base,kcsan}.config ;;
	esac
}

# kernel_hash, kernel_dir: the artifact's, or nothing.
kernel_hash() {
	local options
	mapfile -t options < <(kernel_options)
	((${#options[@]} == 0)) || recipe_hash "$RELEASE" "$MIRROR" -- "${options[@]}" "$HERE/lib/bootstrap.sh" "$HERE/lib/kernel.sh"
}

kernel_dir() {
	[[ -z $(kernel_flavour) ]] || echo "$CACHE/kernel-$RELEASE-$(kernel_hash)"
}

kernel_build() {
	local dir
	[[ -n $(kernel_flavour) ]] || return 0
	dir=$(kernel_dir)
	artifact_ready "$dir" && return 0
	need_root "a kernel"
	need_bootstrap xz=xz-utils
	artifact "$dir" "kernel ($RELEASE)" kernel_recipe
}

kernel_recipe() {
	local root=$1/root src=$1/root/linux
	bootstrap "$(suite_of "$RELEASE")" "$root" minbase linux-source,make,gcc,libc6-dev,libelf-dev,flex,bison,bc,kmod,lz4
	mkdir "$src"
	tar -xf "$root"/usr/src/linux-source-*.tar.xz -C "$src" --strip-components=1
	kernel_compile "$1"
}

# Files of the kernel's core that are instrumented: those that work on structures inside a driver's own.
KERNEL_CHECKED="kernel/workqueue kernel/softirq kernel/time/timer kernel/rcu/tree mm/mmu_notifier mm/hmm lib/interval_tree
	lib/rbtree lib/xarray lib/idr lib/list_debug lib/refcount lib/klist lib/kobject lib/scatterlist
	drivers/virtio/virtio drivers/virtio/virtio_ring"

# kernel_make ROOT TARGET: code that KASAN, UBSAN or KCSAN instruments is several times slower, and so is compiling it.
# Modules are instrumented, ours and those of the RDMA stack; of the rest only KERNEL_CHECKED.
kernel_make() {
	# shellcheck disable=SC2016 # make expands it
	local some='$(if $(part-of-module)$(filter $(vnicd-checked),$(obj)/$(target-stem)),,n)'
	in_root "$1" make -C /linux -j"$(nproc)" vnicd-checked="$(tr -s '\n\t' '  ' <<<"$KERNEL_CHECKED")" \
		KASAN_SANITIZE="$some" UBSAN_SANITIZE="$some" KCSAN_SANITIZE="$some" "$2"
}

# kernel_compile OUT makes OUT/vmlinuz, OUT/modules/VERSION for /lib/modules, and OUT/build, with which other modules
# are compiled, from the source in OUT/root.
kernel_compile() {
	local tmp=$1 root=$1/root src=$1/root/linux kver options
	mapfile -t options < <(kernel_options)
	cat "${options[@]}" >"$src/vnicd.config"
	in_root "$root" make -C /linux KCONFIG_ALLCONFIG=vnicd.config allnoconfig
	kernel_options_hold "$src/vnicd.config" "$src/.config"
	kernel_make "$root" bzImage
	kernel_make "$root" modules
	in_root "$root" make -C /linux INSTALL_MOD_PATH=/out modules_install

	kver=$(cat "$src/include/config/kernel.release")
	cp "$src/arch/x86/boot/bzImage" "$tmp/vmlinuz"
	cp "$src/.config" "$tmp/config"
	dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Package} ${Version}\n' >"$tmp/packages.txt"
	mkdir "$tmp/modules" "$tmp/build"
	mv "$root/out/lib/modules/$kver" "$tmp/modules/"
	rm -f "$tmp/modules/$kver"/{build,source}
	find "$src/scripts" -name '*.o' -delete
	tar -C "$src" -c Makefile Kbuild .config Module.symvers include scripts tools/objtool/objtool arch/x86/include arch/x86/Makefile |
		tar -C "$tmp/build" -x
	rm -rf --one-file-system "$root"
}

# kernel_options_hold WANTED CONFIG: Kconfig silently drops an option whose dependencies are missing. The kernel would
# then lack a check, and tests would pass because nothing is checked.
kernel_options_hold() {
	local line lost=0
	while IFS= read -r line; do
		case $line in
		CONFIG_*=*) grep -qxF -- "$line" "$2" && continue ;;
		'# CONFIG_'*' is not set')
			grep -q "^$(cut -d' ' -f2 <<<"$line")=" "$2" || continue
			;;
		*) continue ;;
		esac
		echo "the configuration does not have: $line"
		lost=1
	done <"$1"
	((lost == 0))
}
