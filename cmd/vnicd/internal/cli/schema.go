package cli

import (
	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

func (a *app) schemaCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration",
		Long: `Prints the JSON Schema (draft 7) of the configuration file and its fragments: every key with
its type, range and description. Editors complete and check files by it, and other programs
can check what they generate. What only the whole configuration shows, such as a name that
is there twice, is found by "vnicd check". The package has it as
/usr/share/vnicd/vnicd.schema.json.`,
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			text, err := config.JSONSchema()
			if err != nil {
				return err
			}
			_, err = a.out.Write(text)
			return err
		},
	}
}
