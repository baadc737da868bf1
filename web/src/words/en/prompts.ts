/** Labels and messages of prompt policies, which control how prompts from ComfyUI clients run. */

const NODES = "One node type per line. * matches any characters, ? matches one character."

export const words = {
  open: "Prompts",
  saved: "Prompt policy saved",
  askFleet: (name: string) => `Prompt policy of ${name}`,
  askTenant: "Prompt policy of this tenant",
  prices: { free: "Free", each: "Per prompt", second: "Per second" },
  tokensFor: { each: "Tokens per prompt", second: "Tokens per GPU second" },
  fleet: {
    isOpen: "Run prompts from ComfyUI clients",
    openText:
      "These prompts don't belong to a registered workflow, and anyone with a customer key can send them. Accepted prompts stay in the queue at their price, even if you change the policy.",
    price: "Price",
    allow: "Allowed node types",
    allowHint: `Allowed even if they are denied by default. ${NODES}`,
    deny: "Denied node types",
    denyHint: "Overrides the allow list.",
    allowsUnknown:
      "Allow node types that aren't built into ComfyUI, unless they take a path, a URL, code or a command",
    inOrder: "Report a client's prompts over WebSockets one after another, as a single ComfyUI does",
    nodes: "Max. nodes per prompt",
    bytes: "Max. bytes per prompt",
    seconds: "Time limit per prompt (seconds)",
    passthrough: "Routes forwarded to a backend",
    passthroughHint: "One path prefix per line, for example /api/etn. The worker must allow it as well.",
  },
  wrong: {
    price: "Enter a number above 0. A price per prompt must be a whole number.",
    allow: "Enter at most 500 lines of up to 200 characters.",
    deny: "Enter at most 500 lines of up to 200 characters.",
    passthrough: "Enter at most 20 paths of letters, digits, - and _, such as /api/etn.",
    nodes: "Enter a whole number from 1 to 100,000.",
    bytes: "Enter a whole number from 1,000 to 67,108,864.",
    seconds: "Enter a whole number from 1 to 604,800.",
  },
  tenant: {
    title: "Prompts",
    text: "Limits for prompts from ComfyUI clients, in addition to each fleet's prompt policy.",
    change: "Edit policy",
    fleets: "Fleets",
    any: "All that accept prompts",
    some: "Selected fleets",
    noneText: "No fleet is selected, so this tenant's prompts are rejected.",
    none: "none",
    allow: "Also allowed node types",
    allowHint: `Allowed on all of the tenant's fleets. ${NODES}`,
    deny: "Also denied node types",
    denyHint: "Denied in addition to the node types that fleets deny.",
    allowed: "Also allowed",
    denied: "Also denied",
    nothing: "no others",
  },
}
