# vnicd. The main commands: `make demo`, `make test`, `make bench`.
SHELL       := /bin/bash
GO          ?= go
BUILD       := build
# The last tag vX.Y.Z, the number of commits since, the commit; before the first tag, commits count from v0.1.0.
VERSION     := $(shell git describe --tags --match 'v[0-9]*' --dirty 2>/dev/null || { n=$$(git rev-list --count HEAD 2>/dev/null) && echo v0.1.0-$$n-g$$(git describe --always --exclude '*' --dirty); } || echo v0.1.0)
FUZZTIME    ?= 10000x
PACKAGES    ?=
ONLY        ?=
ROUNDS      ?= 5
TIME        ?= 1s
APT_KEY     ?=
export PACKAGES

.PHONY: help build libvnicd libvnicd-package demo test test-unit test-whole test-whole-messages test-whole-crash test-whole-passes test-whole-release test-fuzz test-module test-vm test-long test-long-part test-outlive test-upgrade test-kernels test-debug test-ways bench bench-compare profile soak lint site recording image module package guest-packages oci-image apt-tree release deps deps-vm clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

build: ## build the daemon: build/vnicd
	@mkdir -p $(BUILD)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-X main.version=$(VERSION)' -o $(BUILD)/vnicd ./cmd/vnicd

deps: ## install what testing needs (Debian packages)
	@.ci/deps --tests

deps-vm: ## install what images and the demo need
	@.ci/deps

image: deps-vm ## build QEMU root and guest image (PACKAGES="…" adds Debian packages to the guest)
	vm-images/build all

module: deps-vm ## build the guest's kernel module: build/module/vnicd.ko
	vm-images/build module guestdrv/linux $(BUILD)/module

package: build ## Debian package for hosts: build/vnicd_*.deb
	$(GO) run ./cmd/vnicd/packaging/release -version $(VERSION) -out $(BUILD) host

libvnicd: ## the library for C programs on the host: build/libvnicd/libvnicd.{a,so}
	$(MAKE) -C guestdrv/libvnicd OUT=$(CURDIR)/$(BUILD)/libvnicd

libvnicd-package: ## Debian package of it, with headers: build/libvnicd-dev_*.deb
	$(GO) run ./cmd/vnicd/packaging/release -version $(VERSION) -out $(BUILD) library

guest-packages: ## Debian package for guests, the module with DKMS: build/vnicd-dkms_*.deb
	$(GO) run ./cmd/vnicd/packaging/release -version $(VERSION) -out $(BUILD) guest

oci-image: ## the host's OCI image: build/vnicd-*-linux-amd64.oci.tar, for `podman load`
	$(GO) run ./cmd/vnicd/packaging/release -version $(VERSION) -out $(BUILD) image

apt-tree: ## packages for apt-get, to be served: build/vnicd-*-apt.tar (APT_KEY=fingerprint of gpg's key that signs them)
	$(GO) run ./cmd/vnicd/packaging/release -version $(VERSION) -out $(BUILD) -apt-key "$(APT_KEY)" apt

release: ## all files of a release: build/release (APT_KEY as above; two runs give the same bytes, signatures aside)
	$(GO) run ./cmd/vnicd/packaging/release -version $(VERSION) -out $(BUILD) -apt-key "$(APT_KEY)" all

demo: image build ## two VMs on two "hosts", RDMA between them (root is not needed)
	$(GO) run -exec 'vm-images/rootless --net' ./integration/demo

test: deps lint test-unit test-fuzz test-module test-vm ## everything: what CI runs

# The packages whose tests take longest begin first. `make lint` vets all packages.
SLOWEST = ./device/rdma/hca ./cmd/vnicd/internal/cli ./device/virtio/vhostuser ./device/virtio/vnet ./guestdrv

# The race detector has nothing to watch where everything happens on one goroutine, which lint checks.
SINGLE = (device/rdma/(roce|roce/recovery|wire|record)|cmd/vnicd/packaging/release)

# Packages at a time: one more than there are processors, since many tests wait for timers most of the time.
AT_ONCE = $$(($$(nproc) + 1))

# These run their tests in several passes (device/testutil/ways): all without the race detector, the first with it.
PASSES = ./device/rdma/hca ./guestdrv

test-unit: deps ## unit tests with the race detector
	@packages=$$($(GO) list ./... | grep -vE '/(integration|$(SINGLE))$$') && \
	single=$$($(GO) list ./... | grep -E '/$(SINGLE)$$') && set -x && \
	{ $(GO) test -p 1 -vet=off -timeout 15m $(PASSES) $$single & \
	VNICD_WAYS=passes=1 $(GO) test -p $(AT_ONCE) -race -vet=off -timeout 25m $(SLOWEST) $$packages; raced=$$?; \
	wait $$! && exit $$raced; }

# Unit tests of which `make test-unit` runs a sample, as a whole.
WHOLE = messages crash passes release

test-whole: $(WHOLE:%=test-whole-%) ## unit tests of which `make test-unit` runs a sample, as a whole

test-whole-messages: deps
	$(GO) test -race -count=1 -timeout 30m -v -run '^TestMessagesOutliveKills$$' ./device/virtio/vhostuser -args -every-kill

test-whole-crash: deps
	$(GO) test -count=1 -timeout 60m -run '^TestCrash' ./device/rdma/hca -args -every-crash

test-whole-passes: deps
	$(GO) test -race -count=1 -timeout 60m $(PASSES)

test-whole-release: deps
	$(GO) test -count=1 -timeout 60m -v -run '^TestRelease$$' ./cmd/vnicd/packaging/release -args -reproduce

test-fuzz: ## a short fuzz of every decoder (FUZZTIME=10000x inputs each, or 4s)
	@.ci/fuzz $(FUZZTIME)

test-module: image ## the kernel module compiles without warnings of compiler and sparse
	WERROR=1 W=1 C=2 vm-images/build module guestdrv/linux $(BUILD)/module-checked

# VM tests that would make `make test` longer than half an hour.
LONG = ^(TestBesideRXE|TestBeyondQuota|TestCDI|TestCongestedRouter|TestConnections|TestContainer|TestContinuity|TestDriverGone|TestFaultyDevice|TestGuestMemory|TestGuestNetwork|TestHCAMigrates|TestHCAMigratesBesideRXE|TestHostApplications|TestHostBesideRXE|TestHostConnections|TestHostStreams|TestImage|TestIvshmem|TestKernelConsumers|TestKernelSockets|TestLabCommand|TestLabExamples|TestLimits|TestLinuxPeers|TestODPOversubscribed|TestODPPrograms|TestODPRelease|TestOrdinaryUser|TestOwnMemoryOnDemand|TestPage|TestPausedVM|TestPrograms|TestProgramsOnOneHost|TestProtectedUnderlay|TestREADME|TestReleaseWhileLost|TestReleaseWhileStopped|TestService|TestShortOfMemory|TestSkew|TestSnapshot|TestSoak|TestSparseRegion|TestTenants|TestTutorial|TestTwentyLabs|TestVLANUnderlay|TestVMMigrates|TestVMMoves|TestVMQuarantine|TestVerbsSuite)$$

# Kills, upgrades and pauses in number, for hours: run in parts (integration/README.md); and an upgrade from a commit
# that has to be named.
SERIES = ^TestOutlive$$
UPGRADE = ^TestUpgradeFrom$$
FROM ?= HEAD~1

test-vm: deps image build ## boots VMs: the whole path from guest application to wire
	$(GO) test -count=1 -timeout 60m -v -skip '$(LONG)|$(SERIES)|$(UPGRADE)' ./integration -args -handovers=3 -kills=3

# All take over three hours here. PART=1/2 and PART=2/2 are half of them each, the first one with test-whole.
PART = 1/1
LONG_PART = $(shell echo '$(LONG)' | tr -d '^$$()' | tr '|' '\n' | \
	awk -v part='$(PART)' 'BEGIN { split(part, p, "/") } p[1] > 0 && p[1] <= p[2] + 0 && NR % p[2] == p[1] % p[2]' | \
	paste -sd '|')

test-long: test-long-part deps image build $(if $(filter 1/%,$(PART)),test-whole) ## the VM tests that `make test` leaves out, and unit tests as a whole (PART=1/2)
	$(GO) test -count=1 -timeout 5h -v -run '^($(LONG_PART))$$' ./integration

test-long-part:
	@[ -n '$(LONG_PART)' ] || { echo 'PART=$(PART): want a part of all, such as 1/2' >&2; exit 2; }

test-outlive: deps image build ## a short series of kills, upgrades and pauses under verifying programs (ARGS="-kills=500 …")
	$(GO) test -count=1 -timeout 12h -v -run '$(SERIES)' ./integration $(ARGS)

test-upgrade: deps image build ## VMs at work outlive an upgrade from another commit to this one (FROM=HEAD~1)
	@rm -rf $(BUILD)/from && mkdir -p $(BUILD)/from
	git archive $(FROM) | tar -x -C $(BUILD)/from
	cd $(BUILD)/from && CGO_ENABLED=0 $(GO) build -trimpath -ldflags "-X main.version=$$(git rev-parse --short $(FROM))" \
		-o vnicd ./cmd/vnicd
	$(GO) test -count=1 -timeout 60m -v -run '$(UPGRADE)' ./integration -args -upgrade.from=$(CURDIR)/$(BUILD)/from/vnicd

# Debian 12's kernel and the newest of trixie-backports; `make test` boots Debian 13's.
KERNELS = bookworm trixie-backports
KERNEL_TESTS = ^(TestBesideRXE|TestConnections|TestHostStreams|TestIvshmem|TestKernelConsumers|TestKernelSockets|TestLifecycle|TestLimits|TestODPPrograms|TestODPRelease|TestOneHost|TestPrograms|TestReleaseWhileLost|TestRXE|TestTwoHosts|TestVerbsSuite)$$

test-kernels: deps build ## the module without warnings, and its tests in guests with other kernels (KERNELS="bookworm trixie-backports")
	@for r in trixie $(KERNELS); do export RELEASE=$$r && vm-images/build all >/dev/null && \
		WERROR=1 W=1 vm-images/build module guestdrv/linux $(BUILD)/module-$$r || exit 1; done
	@for r in $(KERNELS); do export RELEASE=$$r && echo "== guest kernel $$(vm-images/build paths | sed -n s/KVER=//p)" && \
		$(GO) test -count=1 -timeout 240m -v -run '$(KERNEL_TESTS)' ./integration || exit 1; done

# Kernels with checks that Debian's lack (vm-images/kernel), and the tests of the module that run in them. KCSAN watches
# few accesses at a time, so only the tests run that use the module from several processors for long.
DEBUG_KERNELS = trixie-debug trixie-kcsan
DEBUG_TESTS = ^(TestInjectedFailures|TestKernelChecks)$$|$(KERNEL_TESTS)
KCSAN_TESTS = ^(TestKernelChecks|TestLifecycle|TestODPPrograms|TestODPRelease|TestRXE|TestTwoHosts)$$

test-debug: deps build ## the module's tests in guests with KASAN, lockdep, kmemleak and others, then with KCSAN (DEBUG_KERNELS=trixie-kcsan)
	@for r in $(DEBUG_KERNELS); do export RELEASE=$$r && vm-images/build all >/dev/null && \
		case $$r in *-kcsan) tests='$(KCSAN_TESTS)';; *) tests='$(DEBUG_TESTS)';; esac && \
		echo "== guest kernel $$(vm-images/build paths | sed -n s/KVER=//p)" && \
		$(GO) test -count=1 -timeout 24h -v -run "$$tests" ./integration || exit 1; done

test-ways: deps $(if $(filter vm,$(WAYS)),image build) ## the data path's tests with one engine and two, polling and not, each fast path on and off (WAYS=vm: the VM tests; WAY=3: only the third set)
	@LONG='$(LONG)' .ci/ways $(or $(WAYS),native) $(WAY)

bench: build ## measurements beside their anchors (ONLY="row …", ROUNDS=5, TIME=1s, PROFILE=directory; results: build/bench.jsonl and a plot, build/bench.svg)
	@.ci/deps --tests ucx_perftest=ucx-utils
	$(GO) build -pgo cmd/vnicd/default.pgo -o $(BUILD)/bench ./integration/bench
	$(GO) build -pgo off -o $(BUILD)/plain/bench ./integration/bench
	CGO_ENABLED=0 $(GO) build -trimpath -pgo off -o $(BUILD)/plain/vnicd ./cmd/vnicd
	$(BUILD)/bench -plain $(BUILD)/plain -only "$(ONLY)" -rounds $(ROUNDS) -time $(TIME) -profile "$(PROFILE)"

profile: ## train the compiler's profile anew, cmd/vnicd/default.pgo (ONLY="row …" for fewer rows)
	rm -rf $(BUILD)/profiles
	$(MAKE) bench PROFILE=$(BUILD)/profiles ROUNDS=1
	$(GO) tool pprof -proto $(BUILD)/profiles/*.h?.pprof >$(BUILD)/default.pgo
	mv $(BUILD)/default.pgo cmd/vnicd/default.pgo
	ls $(BUILD)/profiles/*.h?.pprof | sed -E 's|.*/(.*)\.h.\.pprof|\1|' | sort -u >cmd/vnicd/default.pgo.rows

bench-compare: ROUNDS := 10
bench-compare: HEAD := HEAD
bench-compare: DAEMONS :=
bench-compare: ## two commits in turns (BASE=commit, HEAD=commit, ONLY="row …", ROUNDS=10, TIME=1s, DAEMONS=1: only their daemons)
	@[ -n "$(BASE)" ] || { echo 'BASE is missing: make bench-compare BASE=commit' >&2; exit 2; }
	@.ci/deps --tests ucx_perftest=ucx-utils
	$(GO) run ./integration/bench -compare "$(BASE)" -head "$(HEAD)" -only "$(ONLY)" -rounds $(ROUNDS) -time $(TIME) \
		$(if $(DAEMONS),-daemons) -json $(BUILD)/compare.jsonl

soak: TIME := 30m
soak: SEED := 0
soak: build ## attack live daemons beside innocent programs that check every byte (TIME=30m, SEED=from the clock, ONLY="guest …")
	@.ci/deps --tests
	$(GO) run ./integration/soak -time $(TIME) -seed $(SEED) -only "$(ONLY)"

lint: deps ## gofmt, vet, staticcheck and the project's rules
	@.ci/lint

site: ## all documents as static pages: build/site/index.html (REPOSITORY=address of the files that are not part of it)
	rm -rf $(BUILD)/site
	$(GO) run ./docs/site -out $(BUILD)/site $(if $(REPOSITORY),-repository "$(REPOSITORY)")

recording: image ## the README's picture of `make demo`, from a run of it: docs/demo.svg
	@mkdir -p $(BUILD)
	$(GO) run ./docs/recording -as 'make demo' -o docs/demo.svg -- \
		sh -c "$(GO) run -exec 'vm-images/rootless --net' ./integration/demo 2>$(BUILD)/demo.log"

clean: ## remove build results (vm-images/build clean removes downloads and images)
	rm -rf $(BUILD)
