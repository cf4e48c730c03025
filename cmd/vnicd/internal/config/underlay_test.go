package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/vnicd/vnicd/device/ethernet/wireguard"
)

// keyFiles makes files with a private key and in every state that is refused.
func keyFiles(t *testing.T) (dir string, private wgtypes.Key) {
	t.Helper()
	dir = t.TempDir()
	private, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct {
		text string
		mode os.FileMode
	}{"key": {private.String() + "\n", 0o600}, "psk": {private.String(), 0o400}, "open": {private.String(), 0o644},
		"group": {private.String(), 0o640}, "empty": {"", 0o600}, "hex": {strings.Repeat("0f", 32), 0o600}} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(x.text), x.mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, x.mode); err != nil { // whatever the umask
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir, private
}

func publicKey(t *testing.T) string {
	t.Helper()
	k, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	return k.PublicKey().String()
}

func TestUnderlay(t *testing.T) {
	dir, private := keyFiles(t)
	a, b := publicKey(t), publicKey(t)
	c, err := Parse("x.yaml", fmt.Appendf(nil, `
vtep: {local: 10.9.0.1}
networks: [{name: n, vni: 1, peers: [10.9.0.2]}]
underlay:
  protect: wireguard
  interface: wg7
  private-key-file: %s/key
  listen-port: 7
  peers:
    - {vtep: 10.9.0.2, endpoint: "192.0.2.2:51820", public-key: "%s", preshared-key-file: %s/psk, keepalive: 25s}
    - {vtep: 10.9.0.3, endpoint: "[2001:db8::3]:51820", public-key: "%s"}
`, dir, a, dir, b))
	if err != nil {
		t.Fatal(err)
	}
	u := c.Underlay
	if u.Interface != "wg7" || u.Port != 7 || u.PrivateKey.Public() != private.PublicKey() || len(u.Peers) != 2 {
		t.Fatalf("%+v", u)
	}
	psk, err := wireguard.ParseSecret(private.String())
	if err != nil {
		t.Fatal(err)
	}
	if p := u.Peers[0]; p.Addr.String() != "10.9.0.2" || p.Endpoint.String() != "192.0.2.2:51820" ||
		p.PublicKey.String() != a || p.Preshared != psk || p.Keepalive != 25*time.Second {
		t.Errorf("%+v", p)
	}
	if p := u.Peers[1]; p.Endpoint.String() != "[2001:db8::3]:51820" || p.PublicKey.String() != b ||
		p.Preshared != (wireguard.Secret{}) || p.Keepalive != 0 {
		t.Errorf("%+v", p)
	}
	if s := u.Settings(); s.PrivateKey != u.PrivateKey || len(s.Peers) != 2 || s.Peers[1] != u.Peers[1].Peer {
		t.Errorf("%+v", s)
	}

	c, err = Parse("x.yaml", fmt.Appendf(nil, "vtep: {local: 10.9.0.1}\nunderlay: {protect: wireguard, private-key-file: %s/key, peers: []}",
		dir))
	if err != nil {
		t.Fatal(err)
	}
	if u := c.Underlay; u.Interface != "vnicd-wg0" || u.Port != 51820 {
		t.Errorf("defaults: %+v", u)
	}
	for _, text := range []string{"vtep: {local: 10.9.0.1}", "underlay: {protect: none}"} {
		if c, err := Parse("x.yaml", []byte(text)); err != nil || c.Underlay != nil {
			t.Errorf("%s: %+v, %v", text, c, err)
		}
	}
}

// Each mistake is reported with its line and what was expected, and no message has a private key.
func TestUnderlayMistakes(t *testing.T) {
	dir, private := keyFiles(t)
	a, b := publicKey(t), publicKey(t)
	head := "vtep: {local: 10.9.0.1}\nunderlay:\n  protect: wireguard\n  private-key-file: " + dir + "/key\n"
	peer := func(vtep, endpoint, key string) string {
		return fmt.Sprintf("    - {vtep: %q, endpoint: %q, public-key: %q}\n", vtep, endpoint, key)
	}
	good := peer("10.9.0.2", "192.0.2.2:1", a)
	for _, x := range []struct{ name, text, want string }{
		{"protect", "underlay: {protect: ipsec}", `x.yaml:1: protect must be wireguard or none, found "ipsec"`},
		{"no protect", "underlay: {listen-port: 1}", "x.yaml:1: underlay needs `protect`"},
		{"nothing else", "underlay: {protect: wireguard}", "x.yaml:1: underlay needs `private-key-file`"},
		{"no peers", "underlay: {protect: wireguard}", "x.yaml:1: underlay needs `peers`"},
		{"no vtep", "underlay: {protect: wireguard, peers: [], private-key-file: " + dir + "/key}",
			"x.yaml:1: underlay needs a `vtep` section"},
		{"unknown key", head + "  peer: []\n", `x.yaml:5: unknown key "peer" in underlay`},
		{"port", head + "  listen-port: 0\n", "x.yaml:5: listen-port must be a number from 1 to 65535"},
		{"interface", head + "  interface: a/b\n", `underlay interface name "a/b" is not an interface name`},
		{"tap of that name", head + "  peers: []\nnetworks:\n  - {name: n, vni: 1, tap: {name: vnicd-wg0}}\n",
			`underlay interface "vnicd-wg0" is a tap's name in line 7`},
		{"short path", head + "  peers: []\nshort-path: true\n",
			"`short-path: true` is impossible with a protected underlay"},
		{"link-local", strings.Replace(head, "10.9.0.1", `"fe80::1"`, 1) + "  peers: []\n", "is a link-local address"},

		{"relative", strings.Replace(head, dir+"/key",
			"key", 1), `x.yaml:4: private-key-file: want an absolute path, found "key"`},
		{"missing", strings.Replace(head, "/key\n", "/none\n", 1), "x.yaml:4: private-key-file: cannot read the key"},
		{"readable", strings.Replace(head, "/key\n", "/open\n", 1),
			"x.yaml:4: private-key-file: others than its owner can read " + dir + "/open (mode 0644): chmod 600"},
		{"readable by the group", strings.Replace(head, "/key\n", "/group\n", 1), "others than its owner can read"},
		{"directory", strings.Replace(head, "/key\n", "\n", 1), "must be a regular file, found d"},
		{"FIFO", strings.Replace(head, "/key\n", "/fifo\n", 1), "must be a regular file, found p"},
		{"empty", strings.Replace(head, "/key\n", "/empty\n", 1),
			"empty has no key: want 32 bytes in base64, as `wg genkey` prints them"},
		{"hexadecimal", strings.Replace(head, "/key\n", "/hex\n", 1), "hex has no key: want 32 bytes in base64"},

		{"peer without", head + "  peers:\n    - {vtep: 10.9.0.2}\n", "x.yaml:6: a peer of the underlay needs `endpoint`"},
		{"name", head + "  peers:\n" + peer("10.9.0.2",
			"host2:51820", a), `x.yaml:6: endpoint must be a unicast IP address and a port`},
		{"no port", head + "  peers:\n" + peer("10.9.0.2",
			"192.0.2.2", a), `x.yaml:6: endpoint must be a unicast IP address and a port`},
		{"multicast", head + "  peers:\n" + peer("10.9.0.2", "224.0.0.1:1", a), `x.yaml:6: endpoint must be a unicast`},
		{"key", head + "  peers:\n" + peer("10.9.0.2", "192.0.2.2:1", "abc"),
			"x.yaml:6: public-key: want 32 bytes in base64, as `wg pubkey` prints them"},
		{"preshared", head + "  peers:\n    - {preshared-key-file: " + dir + "/open}\n",
			"x.yaml:6: preshared-key-file: others than its owner"},
		{"keepalive", head + "  peers:\n    - {keepalive: 1500ms}\n", "x.yaml:6: keepalive must be whole seconds"},
		{"family", head + "  peers:\n" + peer("fd00::2", "192.0.2.2:1", a),
			"x.yaml:6: vtep fd00::2 is of another address family than vtep local 10.9.0.1"},
		{"itself", head + "  peers:\n" + peer("10.9.0.1", "192.0.2.2:1", a), "x.yaml:6: vtep 10.9.0.1 is this host itself"},
		{"own key", head + "  peers:\n" + peer("10.9.0.2", "192.0.2.2:1", private.PublicKey().String()),
			"x.yaml:6: public-key is this host's own"},
		{"vtep twice", head + "  peers:\n" + good + peer("10.9.0.2", "192.0.2.3:1", b),
			"x.yaml:6: vtep 10.9.0.2 is also a peer in line 7"},
		{"key twice", head + "  peers:\n" + good + peer("10.9.0.3", "192.0.2.3:1", a),
			"x.yaml:7: public-key is already used in line 6"},
		{"endpoint twice", head + "  peers:\n" + good + peer("10.9.0.3", "192.0.2.2:1", b),
			"x.yaml:7: endpoint 192.0.2.2:1 is already used in line 6"},
		{"inside itself", head + "  peers:\n" + good + peer("10.9.0.3", "10.9.0.2:1", b),
			"x.yaml:7: endpoint 10.9.0.2:1 has the address of a VTEP"},
		{"unprotected peer", head + "  peers:\n" + good + "networks:\n  - {name: n, vni: 1, peers: [10.9.0.2, 10.9.0.3]}\n",
			"x.yaml:8: peer 10.9.0.3 of network \"n\" is no `vtep` of underlay peers"},
	} {
		_, err := Parse("x.yaml", []byte(x.text))
		if err == nil {
			t.Errorf("%s: accepted", x.name)
			continue
		}
		if !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s:\n%v\nwant it to contain:\n%s", x.name, err, x.want)
		}
		if strings.Contains(err.Error(), private.String()) {
			t.Errorf("%s: the message has the private key: %v", x.name, err)
		}
	}
}
