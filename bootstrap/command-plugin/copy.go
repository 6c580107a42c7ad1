package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/pkg/sftp"
)

// copyToRemote copies the inputs' source to their host over SFTP, straight to its final path.
//
//	source  | remote path is a directory | is missing      | is a file
//	dir     | path/dir                   | path/dir        | error
//	dir/    | into path                  | into path       | error
//	file    | path/file                  | path            | overwritten
//	text    | error                      | path            | overwritten
//
// Missing parent directories are made.
func copyToRemote(ctx context.Context, log resourceLog, inputs properties) error {
	local, text, isText, err := sourceOf(inputs["source"])
	if err != nil {
		return err
	}
	client, hangUp, err := dial(ctx, log, inputs.object("connection"))
	if err != nil {
		return err
	}
	defer hangUp()
	defer context.AfterFunc(ctx, hangUp)()
	remote, err := sftp.NewClient(client, sftp.UseConcurrentWrites(true))
	if err != nil {
		return causeOf(ctx, err)
	}
	defer remote.Close()
	remotePath, _ := inputs.text("remotePath")
	if isText {
		err = copyText(remote, text, remotePath)
	} else {
		err = copyPath(remote, local, remotePath)
	}
	return causeOf(ctx, err)
}

func copyText(remote *sftp.Client, text, to string) error {
	if info, err := remoteStat(remote, to); err != nil {
		return err
	} else if info != nil && info.IsDir() {
		return fmt.Errorf(
			"remote path %s is a directory; when using a text asset, remotePath must be a file path", to,
		)
	}
	return writeFile(remote, to, strings.NewReader(text))
}

func copyPath(remote *sftp.Client, local, to string) error {
	localInfo, err := os.Stat(local)
	if err != nil {
		return err
	}
	remoteInfo, err := remoteStat(remote, to)
	if err != nil {
		return err
	}
	if !localInfo.IsDir() {
		if remoteInfo != nil && remoteInfo.IsDir() {
			to = path.Join(to, filepath.Base(local))
		}
		return copyFile(remote, local, to)
	}
	if remoteInfo != nil && !remoteInfo.IsDir() {
		return fmt.Errorf("remote path %s exists but is not a directory", to)
	}
	if !strings.HasSuffix(local, "/") {
		to = path.Join(to, filepath.Base(local))
	}
	return copyDirectory(remote, local, to)
}

func copyDirectory(remote *sftp.Client, local, to string) error {
	return filepath.WalkDir(local, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(local, name)
		if err != nil {
			return err
		}
		target := path.Join(to, filepath.ToSlash(relative))
		if !entry.IsDir() {
			return copyFile(remote, name, target)
		}
		if err := remote.MkdirAll(target); err != nil {
			return fmt.Errorf("failed to create remote directory %s: %w", target, err)
		}
		return nil
	})
}

func copyFile(remote *sftp.Client, local, to string) error {
	file, err := os.Open(local)
	if err != nil {
		return err
	}
	defer file.Close()
	return writeFile(remote, to, file)
}

func writeFile(remote *sftp.Client, to string, from io.Reader) error {
	if err := remote.MkdirAll(path.Dir(to)); err != nil {
		return fmt.Errorf("failed to create remote directory %s: %w", path.Dir(to), err)
	}
	file, err := remote.Create(to)
	if err != nil {
		return fmt.Errorf("failed to create remote file %s: %w", to, err)
	}
	_, err = file.ReadFrom(from)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("failed to write remote file %s: %w", to, err)
	}
	return nil
}

// remoteStat is nil without an error where nothing is at the path.
func remoteStat(remote *sftp.Client, name string) (fs.FileInfo, error) {
	info, err := remote.Stat(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("failed to stat remote path %s: %w", name, err)
	}
	return info, nil
}
