/** Labels and messages of the sign-in page. */

export const words = {
  title: "Sign in",
  key: "Key",
  where: "Where do I find my key?",
  whereText:
    "Customers get a key from their administrator, or create one under Keys. Operators get one with `comfyfleet admin operators create`. `comfyfleet up` prints a key in the terminal.",
  noSecret:
    "You don't need a key on your own machine. Open the address that `comfyfleet up` printed. It works once; `comfyfleet open` prints another.",
  act: "Sign in",
  or: "or",
  here: "Continue on this machine",
  hereText: "This address signs you in as the owner of comfyfleet on this machine. It works only once.",
  oidc: (name: string) => `Continue with ${name}`,
  oidcUnnamed: "single sign-on",
  oidcProblem: (code: string) =>
    ({
      forbidden: "You signed in successfully, but you have no access here. Ask your administrator.",
      unauthenticated: "The sign-in took too long, or it wasn't started in this browser. Try again.",
    })[code] ?? "The sign-in service can't be reached right now. Try again later.",
  cookie:
    "A cookie that scripts can't read keeps you signed in. It doesn't contain your key. Signing out also removes your drafts from this browser.",
  empty: "Enter a key.",
  wrong: "This key is unknown, expired or revoked.",
  status: "Status",
  api: "API",
}
