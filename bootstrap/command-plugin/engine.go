package main

import (
	"context"
	"strings"
	"sync"

	pulumirpc "github.com/pulumi/pulumi/sdk/v3/proto/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
)

// engineClient is the way back to the engine: its log, and whether it is still there.
type engineClient struct {
	connection *grpc.ClientConn
	engine     pulumirpc.EngineClient
}

func connectEngine(address string) (*engineClient, error) {
	connection, err := grpc.NewClient(
		"passthrough:///"+address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithIdleTimeout(0), // an idle connection would look like a lost one
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(maxMessageBytes)),
	)
	if err != nil {
		return nil, err
	}
	connection.Connect()
	return &engineClient{connection, pulumirpc.NewEngineClient(connection)}, nil
}

// waitUntilGone returns when the engine no longer listens: a killed engine leaves no plugin behind.
func (e *engineClient) waitUntilGone(ctx context.Context) {
	for {
		state := e.connection.GetState()
		switch state {
		case connectivity.TransientFailure, connectivity.Shutdown:
			return
		case connectivity.Idle:
			e.connection.Connect()
		}
		if !e.connection.WaitForStateChange(ctx, state) {
			return
		}
	}
}

// resourceLog writes to the engine's log in one resource's name.
type resourceLog struct {
	ctx    context.Context
	engine pulumirpc.EngineClient
	urn    string
}

// status shows a line while the resource is being worked on; it is not repeated at the end of the update.
func (l resourceLog) status(line string) {
	l.send(pulumirpc.LogSeverity_INFO, line, true)
}

func (l resourceLog) warning(message string) {
	l.send(pulumirpc.LogSeverity_WARNING, message, false)
}

func (l resourceLog) failure(message string) {
	l.send(pulumirpc.LogSeverity_ERROR, message, false)
}

// A line that cannot be shown must not fail the command that wrote it, so errors end here.
func (l resourceLog) send(severity pulumirpc.LogSeverity, message string, ephemeral bool) {
	_, _ = l.engine.Log(l.ctx, &pulumirpc.LogRequest{
		Severity:  severity,
		Message:   validText(message),
		Urn:       l.urn,
		Ephemeral: ephemeral,
	})
}

// validText replaces bytes that are not UTF-8: a protobuf string with such bytes fails the whole call.
func validText(text string) string {
	return strings.ToValidUTF8(text, "\uFFFD")
}

// maxLogLine is the longest line the official plugin logs (bufio.Scanner's token limit). It hangs on a longer
// one; here the line is logged in pieces of this size.
const maxLogLine = 64 << 10

// lineWriter turns a command's output into log lines as they arrive. Both streams of one command share it,
// so an unfinished line of one is continued by the other, as in the official plugin.
type lineWriter struct {
	mutex sync.Mutex
	rest  []byte
	emit  func(line string)
}

func (w *lineWriter) Write(data []byte) (int, error) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.rest = append(w.rest, data...)
	start := 0
	for i := start; i < len(w.rest); i++ {
		if w.rest[i] == '\n' {
			w.emit(strings.TrimSuffix(string(w.rest[start:i]), "\r"))
			start = i + 1
		} else if i-start+1 == maxLogLine {
			w.emit(string(w.rest[start : i+1]))
			start = i + 1
		}
	}
	w.rest = append(w.rest[:0], w.rest[start:]...)
	return len(data), nil
}

// flush logs what is left of a last line without a line end.
func (w *lineWriter) flush() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if len(w.rest) > 0 {
		w.emit(strings.TrimSuffix(string(w.rest), "\r"))
		w.rest = nil
	}
}
