# shellcheck shell=bash
# Cache directories, locks, host tools and messages, shared by the recipes.
#
# An artifact is a directory $CACHE/KIND-HASH. HASH covers the recipe and its parameters, so a changed recipe uses
# another directory. A build works under a temporary name; a directory with its final name is complete.

export CACHE=${VNICD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vnicd}
export RELEASE=${RELEASE:-trixie}
export PACKAGES=${PACKAGES:-}
MIRROR=${VNICD_MIRROR:-http://deb.debian.org/debian}

say() { printf 'vm-images: %s\n' "$*" >&2; }
die() {
	say "$*"
	exit 1
}

json_escape() {
	local s=${1//\\/\\\\}
	printf '%s' "${s//\"/\\\"}"
}

# suite_of RELEASE: the Debian suite that the root is bootstrapped from.
suite_of() {
	case $1 in
	trixie | trixie-backports | trixie-debug | trixie-kcsan) echo trixie ;;
	bookworm) echo bookworm ;;
	*) die "unknown RELEASE '$1': expected trixie, bookworm, trixie-backports, trixie-debug or trixie-kcsan" ;;
	esac
}

# recipe_hash PARAMETER... -- FILE...: 12 hex digits over parameters, file names and file contents.
recipe_hash() {
	local params=()
	while [[ $1 != -- ]]; do
		params+=("$1")
		shift
	done
	shift
	{
		printf '%s\0' "${params[@]}"
		local f
		while IFS= read -r -d '' f; do
			printf '%s %s\0' "${f#"$HERE"/}" "$(stat -c %a "$f" | cut -c1)"
			cat -- "$f"
		done < <(find "$@" -type f -print0 | LC_ALL=C sort -z)
	} | sha256sum | cut -c1-12
}

artifact_ready() { [[ -e $1/.complete ]]; }

# need_tools TOOL=PACKAGE...: installs the packages of missing tools, or names them if the caller may not install. TOOL
# is a command or an absolute file name.
need_tools() {
	local spec missing=()
	for spec in "$@"; do
		[[ $spec == /* && -r ${spec%%=*} ]] || command -v "${spec%%=*}" >/dev/null || missing+=("${spec#*=}")
	done
	((${#missing[@]})) || return 0
	# Root of a user namespace may not install packages.
	if [[ ! -w /var/lib/dpkg ]] || ! command -v apt-get >/dev/null; then
		die "missing on this host: ${missing[*]}. Install with: apt-get install ${missing[*]}"
	fi
	say "installing on this host: ${missing[*]}"
	{
		DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" ||
			{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; }
	} >"$CACHE/log/apt.log" 2>&1 || die "apt-get install ${missing[*]} failed, see $CACHE/log/apt.log"
}

KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

# need_bootstrap TOOL=PACKAGE...: the tools that every root needs, and those given.
need_bootstrap() {
	mkdir -p "$CACHE/log"
	need_tools mmdebstrap=mmdebstrap "$KEYRING=debian-archive-keyring" "$@"
}

# need_root WHAT: continues as root, which may chroot and chown; an ordinary user gets a user namespace.
need_root() {
	[[ $(id -u) != 0 ]] || return 0
	say "not root: using a user namespace for $1"
	exec "$HERE/rootless" "$HERE/build" "${ARGV[@]}"
}

# artifact DIR WHAT FUNCTION: runs FUNCTION TMPDIR unless DIR is complete. One builder at a time per artifact.
artifact() {
	local dir=$1 what=$2 fn=$3 tmp lock start=$SECONDS
	artifact_ready "$dir" && return 0
	mkdir -p "$CACHE/log"
	exec {lock}>"$CACHE/.lock-${dir##*/}"
	if ! flock -n "$lock"; then
		say "another build of $what is running, waiting for it"
		flock "$lock"
	fi
	if ! artifact_ready "$dir"; then
		say "building $what (log: $CACHE/log/${dir##*/}.log)"
		rm -rf --one-file-system "$dir" "$dir".tmp.*
		tmp=$(mktemp -d "$dir.tmp.XXXXXX")
		chmod 755 "$tmp"
		# A separate process: bash ignores -e in functions called from a condition, even in a subshell. It inherits the
		# lock, so if this process is killed, no other build starts while the recipe still runs.
		progress "$what" "$CACHE/log/${dir##*/}.log" {lock}>&- &
		local ticker=$! rc=0
		"$BASH" "$HERE/build" _recipe "$fn" "$tmp" >"$CACHE/log/${dir##*/}.log" 2>&1 || rc=$?
		kill "$ticker" 2>/dev/null || true
		wait "$ticker" 2>/dev/null || true
		if ((rc)); then
			tail -n 15 "$CACHE/log/${dir##*/}.log" >&2 || true
			rm -rf --one-file-system "$tmp"
			die "building $what failed; its log is $CACHE/log/${dir##*/}.log"
		fi
		touch "$tmp/.complete"
		mv -T "$tmp" "$dir"
		say "$what is ready after $((SECONDS - start)) s: $dir ($(du -sh "$dir" | cut -f1))"
	fi
	exec {lock}>&-
}

# progress WHAT LOG: prints a line every 10 s, so that a long step does not look hung. Ends when this process ends.
progress() {
	local t=0
	# A sleep that outlives its shell must not hold the caller's pipes open.
	# shellcheck disable=SC2217
	while sleep 10 </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
		t=$((t + 10))
		say "... $1, $t s: $(tail -n 1 "$2" 2>/dev/null | tr -d '\r' | cut -c1-90)"
	done
}

cache_check() {
	[[ -n $CACHE && $CACHE == /* && $CACHE != / ]] || die "VNICD_CACHE must be an absolute path, got '$CACHE'"
}

cache_clean() {
	cache_check
	need_root "cleaning the cache"
	local d
	for d in "$CACHE"/{qemu,kernel,guest,module,container,host,lab}-* "$CACHE"/.lock-* "$CACHE"/accel-*; do
		[[ -e $d ]] && rm -rf --one-file-system "$d"
	done
	rm -rf --one-file-system "$CACHE/log"
	say "removed the artifacts in $CACHE"
}

# cache_stale: removes results of older recipes of this RELEASE, including images with other PACKAGES.
cache_stale() {
	cache_check
	need_root "cleaning the cache"
	local d name keep
	keep=" $(qemu_dir) $(kernel_dir) $(guest_dir) $(module_dir) $(host_dir) "
	for d in "${CONTAINER_RELEASES[@]}"; do keep+="$(container_dir "$d") "; done
	for d in "${QEMU_RELEASES[@]}"; do keep+="$(qemu_dir "$d") "; done
	for d in "$CACHE"/{qemu,kernel,guest,module,container,host}-*; do
		name=${d##*/}
		[[ -d $d && $keep != *" $d "* && $name =~ ^(qemu(-[a-z]+)?|(kernel|guest|module)-$RELEASE|(container|host)-[a-z]+)-[0-9a-f]{12}(\.tmp\..*)?$ ]] || continue
		say "removing $d"
		rm -rf --one-file-system "$d"
	done
}
