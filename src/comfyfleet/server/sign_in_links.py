"""One-time secrets that make a browser the owner of `comfyfleet up`.

Each secret is stored as a file in the data folder, named after the secret's hash. So only a user
with write access there can create one. The file is deleted when the first browser sends the secret.
"""

from pathlib import Path

from comfyfleet.server.secrets import hash_key, new_key

FOLDER = "sign-in"
ADDRESS_FILE = "address"
SIGN_IN_PATH = "/sign-in"
# The page reads the secret from the fragment, which browsers don't send to servers.
FRAGMENT = "secret="


class SignInLinks:
    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / FOLDER

    def start(self, url: str) -> str:
        """Deletes links of earlier starts, stores the web app's address and returns a new link."""
        if self._folder.is_dir():
            for file in self._folder.iterdir():
                file.unlink(missing_ok=True)
        (self._data / ADDRESS_FILE).write_text(f"{url}\n", encoding="ascii")
        return self.new_link(url)

    def address(self) -> str | None:
        """Returns the web app's address at the last start, or None if it isn't known."""
        try:
            return (self._data / ADDRESS_FILE).read_text(encoding="ascii").strip() or None
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None

    def new_link(self, url: str) -> str:
        """Returns a sign-in link that works once."""
        secret = new_key()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / hash_key(secret)).touch(mode=0o600)
        return f"{url}{SIGN_IN_PATH}#{FRAGMENT}{secret}"

    def use(self, secret: str) -> bool:
        """Consumes a secret. Returns False if it is unknown or was used before."""
        try:
            (self._folder / hash_key(secret)).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True
