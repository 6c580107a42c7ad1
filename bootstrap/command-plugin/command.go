package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	previousStdout = "PULUMI_COMMAND_STDOUT"
	previousStderr = "PULUMI_COMMAND_STDERR"
)

// maxErrorOutput is how much of a failed command's output its error carries, the end of it: an error travels in
// HTTP/2 trailers, which the engine takes up to 16 MiB.
const maxErrorOutput = 1 << 20

// loggedStreams says for each value of `logging` which streams are logged: stdout, stderr.
var loggedStreams = map[string][2]bool{
	"stdout":          {true, false},
	"stderr":          {false, true},
	"stdoutAndStderr": {true, true},
	"none":            {false, false},
}

// outputs are what a command wrote, each without its last line end.
type outputs struct {
	stdout, stderr string
}

func outputsOf(state properties) outputs {
	stdout, _ := state.text("stdout")
	stderr, _ := state.text("stderr")
	return outputs{stdout, stderr}
}

func (o outputs) into(state properties) {
	state["stdout"] = structpb.NewStringValue(validText(o.stdout))
	state["stderr"] = structpb.NewStringValue(validText(o.stderr))
}

func unknownOutputs(state properties) {
	state["stdout"] = unknown()
	state["stderr"] = unknown()
}

// runCommand runs one shell command on the inputs' host and returns what it wrote. `stdin` feeds every one of a
// resource's commands, its delete too. A cancelled command loses its connection, as when the official plugin is ended:
// what runs on the host is not signalled (sshd would refuse that for root) and may go on there.
func runCommand(
	ctx context.Context, log resourceLog, inputs properties, previous outputs, command string,
) (outputs, error) {
	client, hangUp, err := dial(ctx, log, inputs.object("connection"))
	if err != nil {
		return outputs{}, err
	}
	defer hangUp()
	defer context.AfterFunc(ctx, hangUp)()
	session, err := client.NewSession()
	if err != nil {
		return outputs{}, causeOf(ctx, err)
	}
	defer session.Close()
	if err := setEnvironment(session, log, inputs, previous); err != nil {
		return outputs{}, causeOf(ctx, err)
	}
	if stdin, _ := inputs.text("stdin"); stdin != "" {
		session.Stdin = strings.NewReader(stdin)
	}

	logging, given := inputs.text("logging")
	if !given {
		logging = "stdoutAndStderr"
	}
	var stdout, stderr bytes.Buffer
	both := &sharedBuffer{}
	lines := &lineWriter{emit: log.status}
	session.Stdout = tee(&stdout, both, lines, loggedStreams[logging][0])
	session.Stderr = tee(&stderr, both, lines, loggedStreams[logging][1])

	err = causeOf(ctx, session.Run(command))
	lines.flush()
	if err != nil {
		return outputs{}, fmt.Errorf("%w: running %q:\n%s", err, command, validText(both.end(maxErrorOutput)))
	}
	return outputs{
		stdout: strings.TrimSuffix(stdout.String(), "\n"),
		stderr: strings.TrimSuffix(stderr.String(), "\n"),
	}, nil
}

func tee(own, both, lines io.Writer, logged bool) io.Writer {
	if logged {
		return io.MultiWriter(own, both, lines)
	}
	return io.MultiWriter(own, both)
}

// setEnvironment sets the declared variables, which must work, and the previous outputs, which only warns: most SSH
// servers accept neither.
func setEnvironment(session *ssh.Session, log resourceLog, inputs properties, previous outputs) error {
	environment := inputs.object("environment")
	for _, name := range slices.Sorted(maps.Keys(environment)) {
		value, _ := environment.text(name)
		if err := session.Setenv(name, value); err != nil {
			log.failure(cannotSet(name))
			return fmt.Errorf("could not set environment variable %q: %w", name, err)
		}
	}
	if !inputs.boolean("addPreviousOutputInEnv", true) {
		return nil
	}
	for _, variable := range [][2]string{
		{previousStdout, previous.stdout},
		{previousStderr, previous.stderr},
	} {
		if variable[1] == "" {
			continue
		}
		if err := session.Setenv(variable[0], variable[1]); err != nil {
			log.warning(cannotSet(variable[0]))
		}
	}
	return nil
}

func cannotSet(name string) string {
	return "Unable to set '" + name + "'. This only works if your SSH server is configured to accept\n" +
		"\tthese variables via AcceptEnv. Alternatively, if a Bash-like shell runs the command on the remote host, " +
		"you could\n\tprefix the command itself with the variables in the form 'VAR=value command'"
}

// sharedBuffer collects both streams in the order they arrive.
type sharedBuffer struct {
	mutex sync.Mutex
	data  bytes.Buffer
}

func (b *sharedBuffer) Write(data []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.data.Write(data)
}

// end is the last part of what was written, at most so many bytes.
func (b *sharedBuffer) end(most int) string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	data := b.data.Bytes()
	return string(data[max(0, len(data)-most):])
}
