//go:build tools

// Package tools names the program that this module exists to build, so that `go mod tidy` keeps it.
package tools

import _ "github.com/rhysd/actionlint/cmd/actionlint"
