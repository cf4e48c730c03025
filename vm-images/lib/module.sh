# shellcheck shell=bash
# The build root: the guest's release with its compiler, libibverbs and the headers of the guest's kernel.

module_dir() {
	local guest kver=none
	guest=$(guest_dir)
	artifact_ready "$guest" && kver=$(cat "$guest/kver")
	echo "$CACHE/module-$RELEASE-$(recipe_hash "$RELEASE" "$MIRROR" "$kver" "$(kernel_hash)" -- "$HERE/lib/bootstrap.sh" "$HERE/lib/module.sh")"
}

module_root_build() {
	local dir
	dir=$(module_dir)
	artifact_ready "$dir" && return 0
	need_root "the build root"
	kernel_build
	need_bootstrap
	artifact "$dir" "build root ($RELEASE, kernel $(cat "$(guest_dir)/kver"))" module_recipe
}

module_recipe() {
	local tmp=$1 deb own kver
	bootstrap "$(suite_of "$RELEASE")" "$tmp/root" minbase make,gcc,libc6-dev,libelf1,libibverbs-dev,libssl3,pahole,sparse
	own=$(kernel_dir) kver=$(cat "$(guest_dir)/kver")
	if [[ -n $own ]]; then
		mkdir -p "$tmp/root/lib/modules/$kver"
		cp -r "$own/build" "$tmp/root/lib/modules/$kver/"
	else
		# Unpacked, not installed: as a package the headers need the kernel image, 300 MB that are not used here.
		for deb in "$(guest_dir)"/headers/*.deb; do
			# Debian 12's headers contain /lib/modules, where /lib is a link: tar must follow it, not replace it.
			dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$tmp/root"
		done
	fi
	rm -rf "$tmp"/root/var/{cache,lib/apt}
	echo "$kver" >"$tmp/kver"
}
