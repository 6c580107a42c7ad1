"""One file per kind of pod; each yields the contract's Machine."""
