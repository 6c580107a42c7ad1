"""The line that runs podctl on a pod that does not have it yet."""

BOOT = (
    "command -v python3 >/dev/null||{ echo 'python3 is not on this pod: install 3.8 or newer'>&2;exit 1;};"
    "python3 -c 'import json,sys;d=json.load(sys.stdin.buffer);v=sys.version_info[:2];"
    'v<(3,8)and sys.exit("python3 is %d.%d on this pod: install 3.8 or newer"%v);'
    'exec(compile(d["podctl"],"podctl","exec"),{"__name__":"__main__","DOCUMENT":d})\' prepare'
)
"""A shell line that runs the `prepare` verb of the podctl whose source is the key `podctl` of the JSON document on its
stdin, with that document. For another user than root: `sudo -n sh -c` and this line quoted as one word."""
