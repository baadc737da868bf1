"""One-time sign-in links for the owner of `comfyfleet up`.

For each link's secret, the data folder contains a file named after the secret's hash. Only users
with write access to the folder can create such files. The file is deleted when the link is used.
"""

from pathlib import Path

from comfyfleet.server.secrets import hash_key, new_key

FOLDER = "sign-in"
ADDRESS_FILE = "address"
SIGN_IN_PATH = "/sign-in"
# The page reads the secret from the fragment, which browsers don't send to servers.
FRAGMENT = "secret="


class SignInLinks:
    """The sign-in links that are stored in a data folder."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / FOLDER

    def start(self, url: str) -> str:
        """Deletes the links of earlier starts, stores the web app's URL, and returns a new link."""
        if self._folder.is_dir():
            for file in self._folder.iterdir():
                file.unlink(missing_ok=True)
        (self._data / ADDRESS_FILE).write_text(f"{url}\n", encoding="ascii")
        return self.new_link(url)

    def address(self) -> str | None:
        """Returns the web app's URL at the last start, or None if it is unknown."""
        try:
            return (self._data / ADDRESS_FILE).read_text(encoding="ascii").strip() or None
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None

    def new_link(self, url: str) -> str:
        """Creates a sign-in link that works only once."""
        secret = new_key()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / hash_key(secret)).touch(mode=0o600)
        return f"{url}{SIGN_IN_PATH}#{FRAGMENT}{secret}"

    def use(self, secret: str) -> bool:
        """Uses up a secret. Returns False if it is unknown or was already used."""
        try:
            (self._folder / hash_key(secret)).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True
