# shellcheck shell=bash
# A container of another Debian release, for guests: a disk with its root and its rdma-core.

CONTAINER_RELEASE=bookworm

container_dir() {
	echo "$CACHE/container-$CONTAINER_RELEASE-$(recipe_hash "$CONTAINER_RELEASE" "$MIRROR" -- "$HERE/lib/bootstrap.sh" "$HERE/lib/container.sh")"
}

container_build() {
	local dir
	dir=$(container_dir)
	artifact_ready "$dir" && return 0
	need_root "a container's root"
	need_bootstrap mke2fs=e2fsprogs
	artifact "$dir" "container ($CONTAINER_RELEASE)" container_recipe
}

container_recipe() {
	local tmp=$1 root=$1/root kib
	bootstrap "$CONTAINER_RELEASE" "$root" minbase ibverbs-providers,ibverbs-utils,perftest,rdmacm-utils,iproute2
	rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
	kib=$(du -sk --apparent-size "$root" | cut -f1)
	truncate -s $((kib * 5 / 4 + 65536))K "$tmp/rootfs.ext4"
	mke2fs -q -t ext4 -O ^has_journal,^metadata_csum -m 0 -L container -d "$root" "$tmp/rootfs.ext4"
	rm -rf --one-file-system "$root"
}
