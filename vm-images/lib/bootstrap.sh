# shellcheck shell=bash
# Makes every root. Part of each recipe's hash, unlike common.sh.

# bootstrap SUITE DIR VARIANT PACKAGES [mmdebstrap options]: a Debian root in DIR.
bootstrap() {
	local suite=$1 dir=$2 variant=$3 include=$4
	shift 4
	local sources=(
		"deb [signed-by=$KEYRING] $MIRROR $suite main"
		"deb [signed-by=$KEYRING] $MIRROR $suite-updates main"
		"deb [signed-by=$KEYRING] ${VNICD_SECURITY_MIRROR:-${MIRROR%/debian}/debian-security} $suite-security main"
	)
	# Debian 14 has no backports before its release.
	[[ $suite == forky ]] || sources+=("deb [signed-by=$KEYRING] $MIRROR $suite-backports main")
	mmdebstrap --variant="$variant" --include="$include" \
		--aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Retries "5"' --aptopt='Acquire::Languages "none"' \
		--dpkgopt=force-confold --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
		--setup-hook='mkdir -p "$1/etc" && cp -L /etc/resolv.conf /etc/hosts "$1/etc/" || true' \
		"$@" "$suite" "$dir" "${sources[@]}"
}
