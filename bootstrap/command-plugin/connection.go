package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// Waits between two dials (pulumi sdk/v3 go/common/util/retry, v3.274.1, which the official plugin uses).
const (
	firstDialDelay = 100 * time.Millisecond
	dialDelayGrows = 1.5
	longestDelay   = 5 * time.Second
)

// endpoint is one SSH server and how to log in there.
type endpoint struct {
	address    string
	errorLimit int // dials after which to give up; -1: never
	config     *ssh.ClientConfig
	closeAgent func()
}

// newEndpoint reads a connection. A named agent socket, or one in SSH_AUTH_SOCK, must answer even when a key is given.
func newEndpoint(connection properties) (*endpoint, error) {
	host, _ := connection.text("host")
	user, given := connection.text("user")
	if !given {
		user = defaultUser
	}
	result := &endpoint{
		address:    net.JoinHostPort(host, fmt.Sprintf("%d", int(connection.number("port", defaultPort)))),
		errorLimit: int(connection.number("dialErrorLimit", defaultDialErrorLimit)),
		config: &ssh.ClientConfig{
			User:            user,
			HostKeyCallback: ssh.InsecureIgnoreHostKey(),
			Timeout: time.Duration(connection.number("perDialTimeout", defaultPerDialTimeout) *
				float64(time.Second)),
		},
		closeAgent: func() {},
	}
	if expected, given := connection.text("hostKey"); given {
		key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(expected))
		if err != nil {
			return nil, fmt.Errorf("failed to parse host key: %w", err)
		}
		result.config.HostKeyCallback = ssh.FixedHostKey(key)
	}
	if err := result.addLogins(connection); err != nil {
		return nil, err
	}
	return result, nil
}

func (e *endpoint) addLogins(connection properties) error {
	if pem, given := connection.text("privateKey"); given {
		var signer ssh.Signer
		var err error
		if passphrase, locked := connection.text("privateKeyPassword"); locked {
			signer, err = ssh.ParsePrivateKeyWithPassphrase([]byte(pem), []byte(passphrase))
		} else {
			signer, err = ssh.ParsePrivateKey([]byte(pem))
		}
		if err != nil {
			return err
		}
		e.config.Auth = append(e.config.Auth, ssh.PublicKeys(signer))
	}
	if password, given := connection.text("password"); given {
		answerAll := func(_, _ string, questions []string, _ []bool) ([]string, error) {
			answers := make([]string, len(questions))
			for i := range answers {
				answers[i] = password
			}
			return answers, nil
		}
		e.config.Auth = append(e.config.Auth, ssh.Password(password), ssh.KeyboardInteractive(answerAll))
	}
	socket, given := connection.text("agentSocketPath")
	if !given {
		socket = os.Getenv("SSH_AUTH_SOCK")
	}
	if socket != "" {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		e.closeAgent = func() { _ = conn.Close() }
		e.config.Auth = append(e.config.Auth, ssh.PublicKeysCallback(agent.NewClient(conn).Signers))
	}
	return nil
}

// dial logs in to the host of a connection, through its proxy if it has one. hangUp ends everything that was opened.
func dial(ctx context.Context, log resourceLog, connection properties) (client *ssh.Client, hangUp func(), err error) {
	var opened []func()
	hangUp = func() {
		for i := len(opened) - 1; i >= 0; i-- {
			opened[i]()
		}
	}
	defer func() {
		if err != nil {
			hangUp()
		}
	}()
	target, err := newEndpoint(connection)
	if err != nil {
		return nil, hangUp, err
	}
	opened = append(opened, target.closeAgent)

	direct := (&net.Dialer{Timeout: target.config.Timeout}).DialContext
	proxy := connection.object("proxy")
	if proxy == nil {
		client, err = retryDial(ctx, log, "Dial", target.errorLimit, func() (*ssh.Client, error) {
			return target.logIn(ctx, direct)
		})
		if err != nil {
			return nil, hangUp, err
		}
		opened = append(opened, func() { _ = client.Close() })
		return client, hangUp, nil
	}

	jump, err := newEndpoint(proxy)
	if err != nil {
		return nil, hangUp, fmt.Errorf("proxy: %w", err)
	}
	opened = append(opened, jump.closeAgent)
	jumpClient, err := retryDial(ctx, log, "Dial proxy", jump.errorLimit, func() (*ssh.Client, error) {
		return jump.logIn(ctx, (&net.Dialer{Timeout: jump.config.Timeout}).DialContext)
	})
	if err != nil {
		return nil, hangUp, fmt.Errorf("proxy: %w", err)
	}
	opened = append(opened, func() { _ = jumpClient.Close() })
	client, err = retryDial(ctx, log, "Dial from proxy", target.errorLimit, func() (*ssh.Client, error) {
		return target.logIn(ctx, jumpClient.DialContext)
	})
	if err != nil {
		return nil, hangUp, fmt.Errorf("proxy: %w", err)
	}
	opened = append(opened, func() { _ = client.Close() })
	return client, hangUp, nil
}

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// logIn connects and authenticates once, within the endpoint's time for one dial.
func (e *endpoint) logIn(ctx context.Context, dial dialFunc) (*ssh.Client, error) {
	conn, err := dial(ctx, "tcp", e.address)
	if err != nil {
		return nil, err
	}
	// The handshake counts too: a host that accepts and then says nothing must not hold the update up.
	var timer *time.Timer
	if e.config.Timeout > 0 {
		timer = time.AfterFunc(e.config.Timeout, func() { _ = conn.Close() })
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	ready, channels, requests, err := ssh.NewClientConn(conn, e.address, e.config)
	stopped := stop()
	inTime := timer == nil || timer.Stop()
	switch {
	case err == nil && stopped && inTime:
		return ssh.NewClient(ready, channels, requests), nil
	case !stopped:
		err = context.Cause(ctx)
	case !inTime:
		err = fmt.Errorf("ssh: no answer from %s within %v", e.address, e.config.Timeout)
	}
	_ = conn.Close()
	return nil, err
}

// retryDial tries once more than the limit and tells the last cause, as the official plugin does.
func retryDial(
	ctx context.Context, log resourceLog, what string, limit int, try func() (*ssh.Client, error),
) (*ssh.Client, error) {
	delay := firstDialDelay
	for failed := 1; ; failed++ {
		client, err := try()
		switch {
		case err == nil:
			return client, nil
		case ctx.Err() != nil:
			return nil, causeOf(ctx, err)
		case limit >= 0 && failed > limit:
			return nil, fmt.Errorf("after %d failed attempts: %w", limit, err)
		}
		most := "inf"
		if limit >= 0 {
			most = fmt.Sprint(limit)
		}
		log.status(fmt.Sprintf("%s %d/%s failed: retrying", what, failed, most))
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		delay = min(time.Duration(float64(delay)*dialDelayGrows), longestDelay)
	}
}

var (
	errCancelled  = errors.New("the update was cancelled")
	errEngineGone = errors.New("the engine went away")
)

// causeOf is the error itself, or, where the call was cancelled, why: a closed connection says nothing.
func causeOf(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
