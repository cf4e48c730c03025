# shellcheck shell=bash
# A container of another Debian release, for guests: a disk with its root and its rdma-core.

# The first is the default; forky, Debian 14, has an rdma-core that is newer than any guest's.
CONTAINER_RELEASES=(bookworm forky)

container_dir() { # RELEASE
	echo "$CACHE/container-$1-$(recipe_hash "$1" "$MIRROR" -- "$HERE/lib/bootstrap.sh" "$HERE/lib/container.sh")"
}

container_build() { # RELEASE
	local dir
	[[ " ${CONTAINER_RELEASES[*]} " == *" $1 "* ]] || die "container wants one of ${CONTAINER_RELEASES[*]} (got '$1')"
	dir=$(container_dir "$1")
	artifact_ready "$dir" && return 0
	need_root "a container's root"
	need_bootstrap mke2fs=e2fsprogs
	CONTAINER_RELEASE=$1 artifact "$dir" "container ($1)" container_recipe
}

container_recipe() {
	local tmp=$1 root=$1/root kib
	# Lists of a release in development expire after days; a mirror that lags behind is good enough here.
	bootstrap "$CONTAINER_RELEASE" "$root" minbase ibverbs-providers,ibverbs-utils,perftest,rdmacm-utils,iproute2 \
		--aptopt='Acquire::Check-Valid-Until "false"'
	rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
	kib=$(du -sk --apparent-size "$root" | cut -f1)
	truncate -s $((kib * 5 / 4 + 65536))K "$tmp/rootfs.ext4"
	mke2fs -q -t ext4 -O ^has_journal,^metadata_csum -m 0 -L container -d "$root" "$tmp/rootfs.ext4"
	rm -rf --one-file-system "$root"
}
