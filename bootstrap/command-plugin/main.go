// A stand-in for the official pulumi-resource-command plugin: see README.md.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"

	pulumirpc "github.com/pulumi/pulumi/sdk/v3/proto/go"
	"google.golang.org/grpc"
)

// The engine sends whole states and big command outputs: its own limit is 400 MiB
// (pulumi sdk/v3 go/common/util/rpcutil/serve.go, v3.274.1).
const maxMessageBytes = 400 << 20

func main() {
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, "pulumi-resource-command:", err)
		os.Exit(1)
	}
}

// serve answers the engine on a free loopback port, whose number it prints first, until the engine goes away.
func serve() error {
	// The engine may pass these before its own address; none of them changes an answer.
	flag.Bool("logtostderr", false, "accepted, unused")
	flag.Int("v", 0, "accepted, unused")
	flag.String("tracing", "", "accepted, unused")
	flag.Parse()
	if flag.NArg() < 1 {
		return fmt.Errorf("the engine's address is missing: pulumi starts this program and passes it")
	}
	engine, err := connectEngine(flag.Arg(0))
	if err != nil {
		return fmt.Errorf("cannot reach the engine at %s: %w", flag.Arg(0), err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessageBytes))
	plugin := newProvider(engine)
	pulumirpc.RegisterResourceProviderServer(server, plugin)
	go func() {
		engine.waitUntilGone(context.Background())
		plugin.cancel(errEngineGone)
		server.GracefulStop()
	}()
	fmt.Printf("%d\n", listener.Addr().(*net.TCPAddr).Port)
	return server.Serve(listener)
}
