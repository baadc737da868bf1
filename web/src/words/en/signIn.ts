export const words = {
  title: "Sign in",
  key: "Key",
  where: "where do I find mine?",
  whereText:
    "Customers get theirs from whoever runs this service, or make one under Keys. Operators: comfyfleet admin operators create. Under `comfyfleet up`, the terminal shows it.",
  noSecret:
    "On your own machine you need no key: open the address that `comfyfleet up` has printed. It works once; `comfyfleet open` prints another.",
  act: "Sign in",
  or: "or",
  here: "Continue on this machine",
  hereText: "This address signs you in as the owner of comfyfleet on this machine. It works once.",
  oidc: (name: string) => `Continue with ${name}`,
  oidcUnnamed: "single sign-on",
  oidcProblem: (code: string) =>
    ({
      forbidden: "You are known there, but have no access here. Ask whoever runs this service.",
      unauthenticated: "The sign-in took too long, or was not begun in this browser. Try again.",
    })[code] ?? "The sign-in service cannot be reached at the moment. Try again in a while.",
  cookie:
    "A cookie that scripts cannot read remembers you; it does not hold the key. Signing out clears this browser.",
  empty: "Enter a key.",
  wrong: "This key is unknown, expired or revoked.",
  status: "status",
  api: "API",
}
