# shellcheck shell=bash
# A VM host as operators run it: systemd, libvirt, and a QEMU with the device. A root directory, to start as a
# container.

host_dir() { echo "$CACHE/host-trixie-$(recipe_hash "$MIRROR" -- "$HERE/lib/bootstrap.sh" "$HERE/lib/host.sh")"; }

host_build() {
	local dir
	dir=$(host_dir)
	artifact_ready "$dir" && return 0
	need_root "a host's root"
	need_bootstrap
	artifact "$dir" "host (trixie)" host_recipe
}

host_recipe() {
	local root=$1/root
	bootstrap trixie "$root" apt systemd-sysv,dbus,sudo,man-db,iproute2,iputils-ping,adduser,libvirt-daemon-system,libvirt-clients \
		--customize-hook='chroot "$1" apt-get install -y -t trixie-backports qemu-system-x86 qemu-utils'
	# Packages installed there later install their manual pages, too.
	rm -rf "$root"/etc/dpkg/dpkg.cfg.d/99mmdebstrap "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/etc/{resolv.conf,hostname}
	: >"$root/etc/machine-id"
	printf '127.0.0.1 localhost\n::1 localhost ip6-localhost\n' >"$root/etc/hosts"
}
