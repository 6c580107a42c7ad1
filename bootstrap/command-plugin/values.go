package main

import (
	"maps"

	"github.com/pulumi/pulumi/sdk/v3/go/common/resource/sig"
	"google.golang.org/protobuf/types/known/structpb"
)

// properties are a resource's inputs or outputs in the engine's wire form: secrets, assets and unknown values
// are objects or strings with a signature (pulumi sdk/v3 go/common/resource/sig, v3.274.1).
type properties map[string]*structpb.Value

// fromStruct drops nulls: to the engine null and absent are the same.
func fromStruct(s *structpb.Struct) properties {
	result := properties{}
	for key, value := range s.GetFields() {
		if !isNull(value) {
			result[key] = value
		}
	}
	return result
}

func (p properties) toStruct() *structpb.Struct {
	return &structpb.Struct{Fields: p}
}

func (p properties) clone() properties {
	return maps.Clone(p)
}

func isNull(value *structpb.Value) bool {
	if value == nil {
		return true
	}
	_, null := value.Kind.(*structpb.Value_NullValue)
	return null
}

// signature is the kind of a special value, empty for a plain one.
func signature(value *structpb.Value) string {
	return value.GetStructValue().GetFields()[sig.Key].GetStringValue()
}

func isSecret(value *structpb.Value) bool {
	return signature(value) == sig.Secret
}

func isAsset(value *structpb.Value) bool {
	return signature(value) == sig.AssetSig || signature(value) == sig.ArchiveSig
}

func secret(value *structpb.Value) *structpb.Value {
	if isSecret(value) {
		return value
	}
	return object(properties{sig.Key: structpb.NewStringValue(sig.Secret), "value": value})
}

func object(fields properties) *structpb.Value {
	return structpb.NewStructValue(fields.toStruct())
}

func unknown() *structpb.Value {
	return structpb.NewStringValue(sig.UnknownStringValue)
}

// inner takes off secret and output wrappers; what is not known yet stays an unknown value.
func inner(value *structpb.Value) *structpb.Value {
	for {
		switch signature(value) {
		case sig.Secret:
			value = value.GetStructValue().Fields["value"]
		case sig.OutputValue:
			value = value.GetStructValue().Fields["value"]
			if value == nil {
				return unknown()
			}
		default:
			return value
		}
	}
}

func isUnknown(value *structpb.Value) bool {
	return sig.IsUnknown(inner(value).GetStringValue())
}

// text is a property's string; absent is told from empty.
func (p properties) text(key string) (string, bool) {
	s, ok := inner(p[key]).GetKind().(*structpb.Value_StringValue)
	if !ok {
		return "", false
	}
	return s.StringValue, true
}

// number is a property's number, or the given one where it is absent.
func (p properties) number(key string, otherwise float64) float64 {
	if n, ok := inner(p[key]).GetKind().(*structpb.Value_NumberValue); ok {
		return n.NumberValue
	}
	return otherwise
}

// boolean is a property's truth value, or the given one where it is absent.
func (p properties) boolean(key string, otherwise bool) bool {
	if b, ok := inner(p[key]).GetKind().(*structpb.Value_BoolValue); ok {
		return b.BoolValue
	}
	return otherwise
}

// object is a property's fields, nil where it is absent or not an object.
func (p properties) object(key string) properties {
	if s, ok := inner(p[key]).GetKind().(*structpb.Value_StructValue); ok {
		return fromStruct(s.StructValue)
	}
	return nil
}
