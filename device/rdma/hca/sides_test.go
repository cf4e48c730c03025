package hca

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// sides are the sides that a file's first line names. A file may use declarations of its own side and of the sides
// before it.
var sides = []string{"both", "data", "control"}

// sidedPackage is a type-checked package whose files name their sides.
type sidedPackage struct {
	fset  *token.FileSet
	files []*ast.File
	info  types.Info
	pkg   *types.Package
	side  map[string]int // file name -> index in sides
}

// checkSides type-checks files and returns the violations.
func checkSides(sources map[string]string, imports types.Importer) (problems []string, err error) {
	p := sidedPackage{fset: token.NewFileSet(), side: map[string]int{},
		info: types.Info{Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}}
	marker := regexp.MustCompile(`^// Side: (\w+)\n\n`)
	for name, text := range sources {
		f, err := parser.ParseFile(p.fset, name, text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		p.files = append(p.files, f)
		m := marker.FindStringSubmatch(text)
		if m == nil || !slices.Contains(sides, m[1]) {
			problems = append(problems, fmt.Sprintf(`%s:1: the first line is not "// Side: " and one of %v`, name, sides))
			continue
		}
		p.side[name] = slices.Index(sides, m[1])
	}
	if len(problems) > 0 {
		return problems, nil
	}
	if p.pkg, err = (&types.Config{Importer: imports}).Check("hca", p.fset, p.files, &p.info); err != nil {
		return nil, err
	}
	for _, f := range p.files {
		problems = append(problems, p.foreignUses(f)...)
		problems = append(problems, p.foreignMethods(f)...)
	}
	slices.Sort(problems)
	return problems, nil
}

func (p *sidedPackage) sideOf(n ast.Node) int { return p.side[p.fset.Position(n.Pos()).Filename] }

// declared returns the side that declares an object of the package.
func (p *sidedPackage) declared(o types.Object) int { return p.side[p.fset.Position(o.Pos()).Filename] }

// foreignUses lists a file's uses of sides that it must not use.
func (p *sidedPackage) foreignUses(f *ast.File) (problems []string) {
	ast.Inspect(f, func(n ast.Node) bool {
		id, ok := n.(*ast.Ident)
		if !ok {
			return true
		}
		o := p.info.Uses[id]
		if o == nil || o.Pkg() != p.pkg || !o.Pos().IsValid() || p.declared(o) <= p.sideOf(f) {
			return true
		}
		problems = append(problems, fmt.Sprintf("%v: the %s side uses %s of the %s side (%v)", p.fset.Position(id.Pos()),
			sides[p.sideOf(f)], id.Name, sides[p.declared(o)], p.fset.Position(o.Pos())))
		return true
	})
	return problems
}

// foreignMethods lists a file's methods of types of another side.
func (p *sidedPackage) foreignMethods(f *ast.File) (problems []string) {
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Recv == nil {
			continue
		}
		t := p.info.Defs[fn.Name].(*types.Func).Signature().Recv().Type()
		if ptr, ok := t.(*types.Pointer); ok {
			t = ptr.Elem()
		}
		if o := t.(*types.Named).Obj(); p.declared(o) != p.sideOf(f) {
			problems = append(problems, fmt.Sprintf("%v: the %s side declares method %s of %s, a type of the %s side",
				p.fset.Position(fn.Pos()), sides[p.sideOf(f)], fn.Name.Name, o.Name(), sides[p.declared(o)]))
		}
	}
	return problems
}

// sources returns the package's files without tests.
func sources(t *testing.T) map[string]string {
	names, err := filepath.Glob("*.go")
	if err != nil || len(names) == 0 {
		t.Fatalf("files of the package: %v, %v", names, err)
	}
	all := map[string]string{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = string(text)
	}
	return all
}

// buildImporter imports the packages that the go command has built.
func buildImporter(t *testing.T) types.Importer {
	var stderr bytes.Buffer
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".")
	list.Stderr = &stderr
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", list, err, &stderr)
	}
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[path] = file
	}
	return importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
}

// TestSides checks that the data side uses nothing of the control side, that methods are declared on the side of their
// types, and that README.md lists each file on its side.
func TestSides(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("it reads the sources only: once is enough")
	}
	files := sources(t)
	problems, err := checkSides(files, buildImporter(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range problems {
		t.Error(s)
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, side := range sides {
		row := regexp.MustCompile(`(?m)^\| ` + side + ` \|.*$`).Find(readme)
		var listed, marked []string
		for _, m := range regexp.MustCompile("`([\\w*]+\\.go)`").FindAllSubmatch(row, -1) {
			names, _ := filepath.Glob(string(m[1]))
			listed = append(listed, names...)
		}
		for name, text := range files {
			if strings.HasPrefix(text, "// Side: "+side+"\n") {
				marked = append(marked, name)
			}
		}
		listed = slices.DeleteFunc(listed, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
		slices.Sort(listed)
		slices.Sort(marked)
		if !slices.Equal(listed, marked) {
			t.Errorf("README.md lists on the %s side\n%v, but these name it:\n%v", side, listed, marked)
		}
	}
}

// TestSidesFinds shows the violations that TestSides finds.
func TestSidesFinds(t *testing.T) {
	const (
		both = "// Side: both\n\npackage hca\n\nfunc helper() {}\n"
		data = "// Side: data\n\npackage hca\n\ntype dataSide struct{ n int }\n\nfunc (d *dataSide) run() { helper() }\n"
		ctrl = "// Side: control\n\npackage hca\n\nconst limit = 3\n\ntype Device struct{ data *dataSide; mu int }\n\n" +
			"func (d *Device) grow() { d.data.n++; d.data.run(); helper() }\n"
	)
	for _, c := range []struct{ name, both, data, ctrl, want string }{
		{"clean", "", "", "", ""},
		{"constant", "", "var x = limit\n", "",
			"data.go:8:9: the data side uses limit of the control side (ctrl.go:5:7)"},
		{"type, method and field", "", "func f(d *Device) { d.grow(); d.mu = 0 }\n", "",
			"data.go:8:11: the data side uses Device of the control side (ctrl.go:7:6)\n" +
				"data.go:8:23: the data side uses grow of the control side (ctrl.go:9:18)\n" +
				"data.go:8:33: the data side uses mu of the control side (ctrl.go:7:37)"},
		{"lower side", "var x dataSide\n", "", "",
			"both.go:6:7: the both side uses dataSide of the data side (data.go:5:6)"},
		{"method of the other side's type", "", "", "func (d *dataSide) count() {}\n",
			"ctrl.go:10:1: the control side declares method count of dataSide, a type of the data side"},
	} {
		problems, err := checkSides(map[string]string{"both.go": both + c.both, "data.go": data + c.data,
			"ctrl.go": ctrl + c.ctrl}, nil)
		if err != nil {
			t.Fatal(c.name, err)
		}
		if got := strings.Join(problems, "\n"); got != c.want {
			t.Errorf("%s: found\n%s\nwant\n%s", c.name, got, c.want)
		}
	}
	for _, text := range []string{"package hca\n", "// Side: other\n\npackage hca\n", "// Side: data\npackage hca\n"} {
		if problems, err := checkSides(map[string]string{"a.go": text}, nil); len(problems) != 1 || err != nil {
			t.Errorf("%q: found %v, %v; want one problem, the first line", text, problems, err)
		}
	}
}
