"""podctl: the one program that touches a pod. Stdlib only, Python >= 3.8, run as root.

    python3 podctl.py [--root DIR] [--units-dir DIR] VERB ...        (see `command_line`)

Every verb means "make it so": running it again finds nothing to do. One JSON line of result on stdout, progress on
stderr; a failure is one plain sentence on stderr (detail lines may follow) and exit 1, bad usage is exit 2.
Verbs that take a document read one JSON object from stdin. The first run comes in the document itself, which is
piped to the line in `boot.py`: that calls this text with the document as the global DOCUMENT.
A bundle comes over stdin (`receive-all`) or from a store (`fetch`, by a URL that is a secret), with either into the
same part, so that one goes on where the other was cut, and is a blob as soon as it is whole.

    ROOT/bin/podctl-<12 hex>.py, podctl      this program; by the short name, for people, the newest
    ROOT/staging/<hex>.tar.part, .part/      a bundle on its way: what comes before its weights, and the blob that they
                                             come into; <hex>.tar: a whole one, which an older podctl left to `place`;
                                             <hex>[.<n>].claim: promised to a coming `place`; <hex>.altered: a blob
                                             whose bytes are others now, to be sent again
    ROOT/blobs/sha256/<hex>/                 unpacked bundles: read-only, complete or absent
    ROOT/refs/<stack>/<model>                which digest a model holds: what may not be collected
    ROOT/secrets/<engine>.<revision>.env     root-only: what `secrets` was told, and what a generation may go back to
    ROOT/secrets/<engine>.tls-<key>.key      root-only: the private key of a certificate, by the name of its public one
    ROOT/secrets/<engine>.env                the one in force, the unit's EnvironmentFile: `activate` puts it there
    ROOT/units/<engine>/<n>/                 generations: unit, doc.json and, once it answered, proven and vllm (its
                                             version); stale: what it loaded is not what is there now;
                                             rolled-back: what it was put back instead of
    ROOT/proxies/<engine>.conf, .crt         what the nginx before a public engine is told, and the certificate it shows
    ROOT/venvs/vllm-<version>/               what `prepare` installed; tools/, python/, cache/: what that needed

Every change is written aside, fsynced and renamed. Names that begin with a dot are on their way, or locks: flocks on
files that exist only while they are held. ROOT/.lock is the store's; each engine has one, each bundle on its way, and
the making of venvs, so that a slow engine or upload keeps nobody else waiting.
"""
