#!/bin/sh
# Gets files by curl and compares each with its name, which is its SHA-256: curl.sh HOST PORT REQUESTS NAME ... At least
# so many requests, 100 or so by each curl, with the library that PRELOAD names, if any.
set -eu
host=$1 port=$2 requests=$3
shift 3
names=$(echo "$*" | tr ' ' ,)
each=$((100 / $# + 1)) # times that a curl gets all files
dir=$(mktemp -d)
cd "$dir"
done=0
while [ "$done" -lt "$requests" ]; do
	LD_PRELOAD=${PRELOAD:-} curl -sS --fail --connect-timeout 30 -o '#1-#2' "http://$host:$port/{$names}?n=[1-$each]"
	for f in *; do echo "${f%-*}  $f"; done | sha256sum --check --quiet -
	got=$(ls | wc -l)
	[ "$got" = $((each * $#)) ] || { echo "$got files, expected $((each * $#))"; exit 1; }
	rm ./*
	done=$((done + got))
done
rmdir "$dir"
echo "$done requests"
