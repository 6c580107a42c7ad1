package main

import (
	"fmt"
	"maps"
	"regexp"
	"slices"

	pulumirpc "github.com/pulumi/pulumi/sdk/v3/proto/go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// replacing is the only property whose change the plugin itself answers with a replacement, and only when the
// whole property appears or disappears: a change inside it is an update here, which the SDK's
// replace_on_changes=["triggers[*]"] turns into a replacement.
const replacing = "triggers"

var replacementKind = map[pulumirpc.PropertyDiff_Kind]pulumirpc.PropertyDiff_Kind{
	pulumirpc.PropertyDiff_ADD:    pulumirpc.PropertyDiff_ADD_REPLACE,
	pulumirpc.PropertyDiff_DELETE: pulumirpc.PropertyDiff_DELETE_REPLACE,
	pulumirpc.PropertyDiff_UPDATE: pulumirpc.PropertyDiff_UPDATE_REPLACE,
}

// diffInputs compares the inputs of the last run with the new ones. A secret is compared as a whole, so a
// change anywhere in a secret connection is one change of "connection".
func diffInputs(olds, news properties) *pulumirpc.DiffResponse {
	found := map[string]pulumirpc.PropertyDiff_Kind{}
	response := &pulumirpc.DiffResponse{
		Changes:         pulumirpc.DiffResponse_DIFF_NONE,
		HasDetailedDiff: true,
	}
	for _, key := range keysOfBoth(olds, news) {
		before := len(found)
		diffValues(key, olds[key], news[key], found)
		if len(found) > before {
			response.Diffs = append(response.Diffs, key)
			response.Changes = pulumirpc.DiffResponse_DIFF_SOME
		}
	}
	response.DetailedDiff = map[string]*pulumirpc.PropertyDiff{}
	for path, kind := range found {
		if path == replacing {
			kind = replacementKind[kind]
			response.Replaces = append(response.Replaces, path)
		}
		response.DetailedDiff[path] = &pulumirpc.PropertyDiff{Kind: kind}
	}
	return response
}

func diffValues(path string, before, after *structpb.Value, found map[string]pulumirpc.PropertyDiff_Kind) {
	switch {
	case isNull(before) && isNull(after):
	case isNull(before):
		found[path] = pulumirpc.PropertyDiff_ADD
	case isNull(after):
		found[path] = pulumirpc.PropertyDiff_DELETE
	case isAsset(before) && isAsset(after):
		if signature(before) != signature(after) || assetHash(before) != assetHash(after) {
			found[path] = pulumirpc.PropertyDiff_UPDATE
		}
	case isPlainObject(before) && isPlainObject(after):
		diffObjects(path, fromStruct(before.GetStructValue()), fromStruct(after.GetStructValue()), found)
	case before.GetListValue() != nil && after.GetListValue() != nil:
		diffLists(path, before.GetListValue().Values, after.GetListValue().Values, found)
	case !proto.Equal(before, after):
		found[path] = pulumirpc.PropertyDiff_UPDATE
	}
}

func diffObjects(path string, before, after properties, found map[string]pulumirpc.PropertyDiff_Kind) {
	for _, key := range keysOfBoth(before, after) {
		diffValues(joinPath(path, key), before[key], after[key], found)
	}
}

func diffLists(path string, before, after []*structpb.Value, found map[string]pulumirpc.PropertyDiff_Kind) {
	at := func(list []*structpb.Value, i int) *structpb.Value {
		if i < len(list) {
			return list[i]
		}
		return nil
	}
	for i := range max(len(before), len(after)) {
		diffValues(fmt.Sprintf("%s[%d]", path, i), at(before, i), at(after, i), found)
	}
}

func isPlainObject(value *structpb.Value) bool {
	return value.GetStructValue() != nil && signature(value) == ""
}

func keysOfBoth(before, after properties) []string {
	both := before.clone()
	maps.Copy(both, after)
	return slices.Sorted(maps.Keys(both))
}

var bareKey = regexp.MustCompile(`^[a-zA-Z_$][a-zA-Z0-9_$]*$`)

// joinPath writes a property path as the engine reads it: a.b, or a["b c"].
func joinPath(path, key string) string {
	switch {
	case !bareKey.MatchString(key):
		return fmt.Sprintf("%s[%q]", path, key)
	case path == "":
		return key
	default:
		return path + "." + key
	}
}
