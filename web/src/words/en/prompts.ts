/** Of the terms on which prompts of ComfyUI's clients are run. */

const NODES = "One node type in each line; * stands for any characters, ? for one."

export const words = {
  open: "Prompts",
  saved: "The terms of prompts are changed",
  askFleet: (name: string) => `On which terms does ${name} run prompts?`,
  askTenant: "What may this tenant's prompts use?",
  prices: { free: "Free", each: "For each prompt", second: "By the second" },
  tokensFor: { each: "Tokens for each prompt", second: "Tokens for each second on the GPU" },
  fleet: {
    isOpen: "It runs prompts of ComfyUI's clients",
    openText:
      "Such prompts are of no registered workflow: whoever has a key of a customer may send them. Accepted ones stay in the queue, at their price.",
    price: "Price",
    allow: "Node types that may run, too",
    allowHint: `Although they are denied by default. ${NODES}`,
    deny: "Node types that may not run",
    denyHint: "Stronger than what is allowed.",
    allowsUnknown:
      "Node types that are not ComfyUI's own may run, unless they take a path, a URL, code or a command",
    inOrder: "WebSockets show a client's prompts one after another, as with a single ComfyUI",
    nodes: "Most nodes of a prompt",
    bytes: "Most bytes of a prompt",
    seconds: "A prompt may run, in seconds",
    passthrough: "Routes that are passed on to a backend",
    passthroughHint: "One beginning in each line, such as /api/etn. The worker must allow it, too.",
  },
  wrong: {
    price: "A number above 0; whole for each prompt.",
    allow: "At most 500 lines of 200 characters.",
    deny: "At most 500 lines of 200 characters.",
    passthrough: "Paths of letters, digits, - and _, such as /api/etn; at most 20.",
    nodes: "A whole number from 1 to 100,000.",
    bytes: "A whole number from 1,000 to 67,108,864.",
    seconds: "A whole number from 1 to 604,800.",
  },
  tenant: {
    title: "Prompts",
    text: "Of ComfyUI's clients, on the terms of each fleet.",
    change: "Set the terms",
    fleets: "Fleets",
    any: "All that take prompts",
    some: "Only these",
    noneText: "None is chosen: its prompts are refused.",
    none: "none",
    allow: "Node types that they may use, too",
    allowHint: `On any of its fleets. ${NODES}`,
    deny: "Node types that they may not use",
    denyHint: "Besides those that fleets deny.",
    allowed: "Also allowed",
    denied: "Denied",
    nothing: "as the fleets say",
  },
}
