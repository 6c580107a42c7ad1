package main

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/hex"
	"strings"
	"time"

	pulumirpc "github.com/pulumi/pulumi/sdk/v3/proto/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/structpb"
)

// version is that of the official plugin whose answers these are.
const version = "1.2.1"

// The official plugin keeps the version of the library it is made with in its configuration, hence in state.
const (
	libraryVersionKey = "__pulumi-go-provider-version"
	libraryVersion    = "1.2.0"
)

//go:embed schema.json
var schema string

// provider answers the engine's calls.
type provider struct {
	pulumirpc.UnimplementedResourceProviderServer
	engine *engineClient
	alive  context.Context
	cancel context.CancelCauseFunc
}

func newProvider(engine *engineClient) *provider {
	alive, cancel := context.WithCancelCause(context.Background())
	return &provider{engine: engine, alive: alive, cancel: cancel}
}

// operation bounds one call: by the call itself, by Cancel, and by the resource's customTimeouts (seconds, 0: none).
func (p *provider) operation(ctx context.Context, urn string, timeout float64) (context.Context, resourceLog, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.alive, func() { cancel(context.Cause(p.alive)) })
	log := resourceLog{ctx, p.engine.engine, urn}
	free := func() { stop(); cancel(nil) }
	if timeout > 0 {
		bounded, cancelTimer := context.WithTimeout(ctx, time.Duration(timeout*float64(time.Second)))
		return bounded, log, func() { cancelTimer(); free() }
	}
	return ctx, log, free
}

// typeAndName reads a URN: urn:pulumi:<stack>::<project>::<parent types>$<type>::<name>.
func typeAndName(urn string) (resourceType, name string) {
	parts := strings.SplitN(urn, "::", 4)
	if len(parts) < 4 {
		return urn, urn
	}
	types := strings.Split(parts[2], "$")
	return types[len(types)-1], parts[3]
}

func newID(prefix string) string {
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails
	return prefix + hex.EncodeToString(random[:])
}

func (p *provider) GetPluginInfo(context.Context, *emptypb.Empty) (*pulumirpc.PluginInfo, error) {
	return &pulumirpc.PluginInfo{Version: version}, nil
}

func (p *provider) GetSchema(context.Context, *pulumirpc.GetSchemaRequest) (*pulumirpc.GetSchemaResponse, error) {
	return &pulumirpc.GetSchemaResponse{Schema: schema}, nil
}

func (p *provider) CheckConfig(_ context.Context, request *pulumirpc.CheckRequest) (*pulumirpc.CheckResponse, error) {
	inputs := fromStruct(request.GetNews())
	inputs[libraryVersionKey] = structpb.NewStringValue(libraryVersion)
	return &pulumirpc.CheckResponse{Inputs: inputs.toStruct()}, nil
}

func (p *provider) DiffConfig(context.Context, *pulumirpc.DiffRequest) (*pulumirpc.DiffResponse, error) {
	return nil, status.Error(codes.Unimplemented, "DiffConfig is not implemented")
}

func (p *provider) Configure(context.Context, *pulumirpc.ConfigureRequest) (*pulumirpc.ConfigureResponse, error) {
	return &pulumirpc.ConfigureResponse{
		AcceptSecrets:   true,
		SupportsPreview: true,
		AcceptResources: true,
		AcceptOutputs:   true,
	}, nil
}

// Cancel ends every running command and refuses new ones.
func (p *provider) Cancel(context.Context, *emptypb.Empty) (*emptypb.Empty, error) {
	p.cancel(errCancelled)
	return &emptypb.Empty{}, nil
}

func (p *provider) Check(_ context.Context, request *pulumirpc.CheckRequest) (*pulumirpc.CheckResponse, error) {
	resourceType, _ := typeAndName(request.GetUrn())
	if err := checkType(resourceType); err != nil {
		return nil, err
	}
	inputs := normalise(fromStruct(request.GetNews()))
	return &pulumirpc.CheckResponse{
		Inputs:   inputs.toStruct(),
		Failures: checkInputs(resourceType, inputs),
	}, nil
}

func (p *provider) Diff(_ context.Context, request *pulumirpc.DiffRequest) (*pulumirpc.DiffResponse, error) {
	resourceType, _ := typeAndName(request.GetUrn())
	if err := checkType(resourceType); err != nil {
		return nil, err
	}
	olds := fromStruct(request.GetOldInputs())
	if request.GetOldInputs() == nil {
		olds = fromStruct(request.GetOlds())
	}
	return diffInputs(onlyInputs(resourceType, olds), onlyInputs(resourceType, fromStruct(request.GetNews()))), nil
}

func (p *provider) Create(ctx context.Context, request *pulumirpc.CreateRequest) (*pulumirpc.CreateResponse, error) {
	resourceType, name := typeAndName(request.GetUrn())
	if err := checkType(resourceType); err != nil {
		return nil, err
	}
	ctx, log, free := p.operation(ctx, request.GetUrn(), request.GetTimeout())
	defer free()
	inputs := fromStruct(request.GetProperties())
	state := normalise(inputs)
	if resourceType == copyType {
		if request.GetPreview() {
			state["source"] = unknown()
			return &pulumirpc.CreateResponse{Properties: state.toStruct()}, nil
		}
		if err := copyToRemote(ctx, log, inputs); err != nil {
			return nil, err
		}
		return &pulumirpc.CreateResponse{Id: newID(""), Properties: state.toStruct()}, nil
	}

	var written outputs
	if request.GetPreview() {
		unknownOutputs(state)
		return &pulumirpc.CreateResponse{Id: newID(name), Properties: state.toStruct()}, nil
	}
	if create, given := inputs.text("create"); given {
		var err error
		if written, err = runCommand(ctx, log, inputs, outputs{}, create); err != nil {
			return nil, err
		}
	}
	written.into(state)
	return &pulumirpc.CreateResponse{Id: newID(name), Properties: state.toStruct()}, nil
}

func (p *provider) Update(ctx context.Context, request *pulumirpc.UpdateRequest) (*pulumirpc.UpdateResponse, error) {
	resourceType, _ := typeAndName(request.GetUrn())
	if err := checkType(resourceType); err != nil {
		return nil, err
	}
	ctx, log, free := p.operation(ctx, request.GetUrn(), request.GetTimeout())
	defer free()
	olds, inputs := fromStruct(request.GetOlds()), fromStruct(request.GetNews())
	state := normalise(inputs)
	if resourceType == copyType {
		switch {
		case request.GetPreview():
			state["source"] = unknown()
		case mustCopyAgain(olds, inputs):
			if err := copyToRemote(ctx, log, inputs); err != nil {
				return nil, err
			}
		}
		return &pulumirpc.UpdateResponse{Properties: state.toStruct()}, nil
	}

	if request.GetPreview() {
		unknownOutputs(state)
		return &pulumirpc.UpdateResponse{Properties: state.toStruct()}, nil
	}
	written := outputsOf(olds)
	command, given := inputs.text("update")
	if !given {
		command, given = inputs.text("create")
	}
	if given {
		var err error
		if written, err = runCommand(ctx, log, inputs, written, command); err != nil {
			return nil, err
		}
	}
	written.into(state)
	return &pulumirpc.UpdateResponse{Properties: state.toStruct()}, nil
}

// mustCopyAgain looks at what is copied and where to on the host; another host alone copies nothing.
func mustCopyAgain(olds, news properties) bool {
	before, _ := olds.text("remotePath")
	after, _ := news.text("remotePath")
	return before != after || assetHash(inner(olds["source"])) != assetHash(inner(news["source"]))
}

// Read answers the state as it was: no host is asked.
func (p *provider) Read(_ context.Context, request *pulumirpc.ReadRequest) (*pulumirpc.ReadResponse, error) {
	resourceType, _ := typeAndName(request.GetUrn())
	if err := checkType(resourceType); err != nil {
		return nil, err
	}
	return &pulumirpc.ReadResponse{
		Id:         request.GetId(),
		Properties: normalise(fromStruct(request.GetProperties())).toStruct(),
		Inputs:     normalise(fromStruct(request.GetInputs())).toStruct(),
	}, nil
}

// Delete runs the delete command, if there is one; a copied file stays.
func (p *provider) Delete(ctx context.Context, request *pulumirpc.DeleteRequest) (*emptypb.Empty, error) {
	resourceType, _ := typeAndName(request.GetUrn())
	if err := checkType(resourceType); err != nil {
		return nil, err
	}
	ctx, log, free := p.operation(ctx, request.GetUrn(), request.GetTimeout())
	defer free()
	state := fromStruct(request.GetProperties())
	if command, given := state.text("delete"); given && resourceType == commandType {
		if _, err := runCommand(ctx, log, state, outputsOf(state), command); err != nil {
			return nil, err
		}
	}
	return &emptypb.Empty{}, nil
}
