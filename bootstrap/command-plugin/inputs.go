package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/pulumi/pulumi/sdk/v3/go/common/resource/sig"
	pulumirpc "github.com/pulumi/pulumi/sdk/v3/proto/go"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	commandType = "command:remote:Command"
	copyType    = "command:remote:CopyToRemote"
)

// Defaults of a connection (pulumi-command 1.2.1, its schema).
const (
	defaultUser           = "root"
	defaultPort           = 22
	defaultDialErrorLimit = 10
	defaultPerDialTimeout = 15
)

var inputNames = map[string][]string{
	commandType: {
		"addPreviousOutputInEnv", "connection", "create", "delete", "environment", "logging", "stdin",
		"triggers", "update",
	},
	copyType: {"connection", "remotePath", "source", "triggers"},
}

func checkType(resourceType string) error {
	if _, known := inputNames[resourceType]; known {
		return nil
	}
	return fmt.Errorf(
		"this stand-in for the command plugin has %s and %s, not %q: use the official plugin for it",
		commandType, copyType, resourceType,
	)
}

// onlyInputs leaves out the outputs of a state.
func onlyInputs(resourceType string, state properties) properties {
	result := properties{}
	for _, name := range inputNames[resourceType] {
		if value, ok := state[name]; ok {
			result[name] = value
		}
	}
	return result
}

// normalise gives every value the shape the official plugin answers with: the connection and what is secret in
// it marked as secret, its defaults filled in, assets with all their keys.
func normalise(inputs properties) properties {
	result := inputs.clone()
	if connection, ok := result["connection"]; ok {
		result["connection"] = secret(normaliseWrapped(connection))
	}
	if source, ok := result["source"]; ok {
		result["source"] = completeAsset(source)
	}
	return result
}

// normaliseWrapped normalises a connection and leaves the secret around it, if any, as it is.
func normaliseWrapped(value *structpb.Value) *structpb.Value {
	if isSecret(value) {
		return secret(normaliseWrapped(value.GetStructValue().Fields["value"]))
	}
	if !isPlainObject(value) {
		return value
	}
	fields := fromStruct(value.GetStructValue())
	for name, otherwise := range map[string]*structpb.Value{
		"user":           structpb.NewStringValue(defaultUser),
		"port":           structpb.NewNumberValue(defaultPort),
		"dialErrorLimit": structpb.NewNumberValue(defaultDialErrorLimit),
		"perDialTimeout": structpb.NewNumberValue(defaultPerDialTimeout),
	} {
		if _, given := fields[name]; !given {
			fields[name] = otherwise
		}
	}
	for _, name := range []string{"password", "privateKey", "privateKeyPassword"} {
		if value, given := fields[name]; given {
			fields[name] = secret(value)
		}
	}
	if proxy, given := fields["proxy"]; given {
		fields["proxy"] = normaliseWrapped(proxy)
	}
	return object(fields)
}

func completeAsset(value *structpb.Value) *structpb.Value {
	if isSecret(value) {
		return secret(completeAsset(value.GetStructValue().Fields["value"]))
	}
	var empty properties
	switch signature(value) {
	case sig.AssetSig:
		empty = properties{"path": structpb.NewStringValue(""), "text": structpb.NewStringValue("")}
	case sig.ArchiveSig:
		empty = properties{"path": structpb.NewStringValue(""), "assets": object(properties{})}
	default:
		return value
	}
	empty["uri"] = structpb.NewStringValue("")
	fields := fromStruct(value.GetStructValue())
	for name, otherwise := range empty {
		if _, given := fields[name]; !given {
			fields[name] = otherwise
		}
	}
	return object(fields)
}

func assetHash(value *structpb.Value) string {
	hash, _ := fromStruct(value.GetStructValue()).text("hash")
	return hash
}

var emptyTextHash = func() string {
	sum := sha256.Sum256(nil)
	return hex.EncodeToString(sum[:])
}()

// sourceOf reads what a copy is made from: the text, or else the local path.
func sourceOf(value *structpb.Value) (path, text string, isText bool, err error) {
	value = inner(value)
	fields := fromStruct(value.GetStructValue())
	path, _ = fields.text("path")
	text, _ = fields.text("text")
	uri, _ := fields.text("uri")
	hash, _ := fields.text("hash")
	switch {
	case signature(value) == sig.AssetSig && path == "" && uri == "" && (text != "" || hash == emptyTextHash):
		return "", text, true, nil
	case signature(value) == sig.AssetSig && path == "":
		return "", "", false, fmt.Errorf("asset must be a path-based file asset or a text asset")
	case signature(value) == sig.ArchiveSig && path == "":
		return "", "", false, fmt.Errorf("archive must be a path to a file or directory")
	case !isAsset(value):
		return "", "", false, fmt.Errorf("either asset or archive must be set")
	default:
		return path, "", false, nil
	}
}

// checkInputs lists what is wrong with inputs, one reason each; values not known yet are not looked at.
func checkInputs(resourceType string, inputs properties) []*pulumirpc.CheckFailure {
	var failures []*pulumirpc.CheckFailure
	fail := func(property, reason string) {
		failures = append(failures, &pulumirpc.CheckFailure{Property: property, Reason: reason})
	}
	switch connection := inputs["connection"]; {
	case connection == nil:
		fail("connection", "a connection must be given")
	case isUnknown(connection):
	default:
		if host := inputs.object("connection")["host"]; host == nil {
			fail("connection.host", "a host must be given")
		}
	}
	if resourceType == copyType {
		if source := inputs["source"]; source == nil || !isUnknown(source) {
			if _, _, _, err := sourceOf(source); err != nil {
				fail("source", err.Error())
			}
		}
		if _, given := inputs["remotePath"]; !given {
			fail("remotePath", "a remote path must be given")
		}
	}
	if logging, given := inputs.text("logging"); given && !isUnknown(inputs["logging"]) {
		if _, known := loggedStreams[logging]; !known {
			fail("logging", fmt.Sprintf("%q is not stdout, stderr, stdoutAndStderr or none", logging))
		}
	}
	return failures
}
