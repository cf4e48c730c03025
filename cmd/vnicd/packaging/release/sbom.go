package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"
)

// The software bill of materials of the daemon: SPDX 2.3 in JSON (https://spdx.github.io/spdx-spec/v2.3/).

type spdxDocument struct {
	Version       string             `json:"spdxVersion"`
	DataLicense   string             `json:"dataLicense"`
	ID            string             `json:"SPDXID"`
	Name          string             `json:"name"`
	Namespace     string             `json:"documentNamespace"`
	Creation      spdxCreation       `json:"creationInfo"`
	Packages      []spdxPackage      `json:"packages"`
	Relationships []spdxRelationship `json:"relationships"`
}

type spdxCreation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	ID               string         `json:"SPDXID"`
	Name             string         `json:"name"`
	Version          string         `json:"versionInfo"`
	FileName         string         `json:"packageFileName,omitempty"`
	Purpose          string         `json:"primaryPackagePurpose"`
	DownloadLocation string         `json:"downloadLocation"`
	FilesAnalyzed    bool           `json:"filesAnalyzed"`
	Concluded        string         `json:"licenseConcluded"`
	Declared         string         `json:"licenseDeclared"`
	Copyright        string         `json:"copyrightText"`
	SourceInfo       string         `json:"sourceInfo,omitempty"`
	Checksums        []spdxChecksum `json:"checksums,omitempty"`
	References       []spdxRef      `json:"externalRefs"`
}

type spdxChecksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type spdxRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type spdxRelationship struct {
	From string `json:"spdxElementId"`
	Type string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

// notInID matches what an SPDXID must not contain (section 3.2).
var notInID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

// purl returns the package URL of a Go module.
func purl(path, version string) []spdxRef {
	return []spdxRef{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + path + "@" + version}}
}

// sbom returns the document for the daemon that host has built.
func (b *builder) sbom(arch string) ([]byte, error) {
	modules, err := b.linked(arch)
	if err != nil {
		return nil, err
	}
	binary, err := os.ReadFile(b.binary(arch))
	if err != nil {
		return nil, err
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(binary))
	name := fmt.Sprintf("vnicd-%s-linux-%s", b.version.pkg(), arch)
	const unknown, daemon = "NOASSERTION", "SPDXRef-vnicd"
	d := spdxDocument{
		Version: "SPDX-2.3", DataLicense: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: name,
		Namespace: "https://github.com/vnicd/vnicd/spdx/" + name + "-" + sum,
		Creation: spdxCreation{Created: b.time.Format(time.RFC3339),
			Creators: []string{"Organization: the vnicd authors", "Tool: vnicd-release-" + b.version.pkg()}},
		Packages: []spdxPackage{{
			ID: daemon, Name: "vnicd", Version: b.version.git, FileName: "./usr/bin/vnicd", Purpose: "APPLICATION",
			DownloadLocation: "git+https://github.com/vnicd/vnicd@" + b.version.ref(), Concluded: "Apache-2.0",
			Declared: "Apache-2.0", Copyright: unknown, Checksums: []spdxChecksum{{"SHA256", sum}},
			References: purl("github.com/vnicd/vnicd", b.version.git),
		}},
		Relationships: []spdxRelationship{{"SPDXRef-DOCUMENT", "DESCRIBES", daemon}},
	}
	for _, m := range modules {
		p := spdxPackage{
			ID:   "SPDXRef-" + notInID.ReplaceAllString(m.path+"-"+m.version, "-"),
			Name: m.path, Version: m.version, Purpose: "LIBRARY", DownloadLocation: unknown, Concluded: unknown,
			Declared: m.licence, Copyright: unknown, References: purl(m.path, m.version),
		}
		if m.sum != "" {
			p.SourceInfo = "hash of the module as in go.sum: " + m.sum
		}
		d.Packages = append(d.Packages, p)
		d.Relationships = append(d.Relationships, spdxRelationship{daemon, "STATIC_LINK", p.ID})
	}
	text, err := json.MarshalIndent(d, "", "  ")
	return append(text, '\n'), err
}

// writeSBOM writes the document into a folder.
func (b *builder) writeSBOM(arch, dir string) error {
	text, err := b.sbom(arch)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, fmt.Sprintf("vnicd-%s-linux-%s.spdx.json", b.version.pkg(), arch)), text, 0o644)
}
