//go:build tools

// Package tools names the program that this module exists to build, so that `go mod tidy` keeps it.
package tools

import _ "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi"
