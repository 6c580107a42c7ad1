module command-plugin

go 1.26.6

require (
	github.com/pkg/sftp v1.13.12
	github.com/pulumi/pulumi/sdk/v3 v3.274.1
	golang.org/x/crypto v0.58.0
	google.golang.org/grpc v1.83.2
	google.golang.org/protobuf v1.36.11
)

require (
	github.com/kr/fs v0.1.0 // indirect
	go.opentelemetry.io/otel/sdk/metric v1.45.0 // indirect
	golang.org/x/net v0.62.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260803160001-6ac0973c030d // indirect
)
