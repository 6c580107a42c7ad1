//go:build tools

// Package tools names the program that this module exists to build, so that `go mod tidy` keeps it.
package tools

import _ "github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python"
