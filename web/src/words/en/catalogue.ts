/** Labels and messages of the effect catalog, which is the customers' home page. */

export const words = {
  title: "Effects",
  lead: "Pick a look, drop a photo.",
  all: "All",
  tags: "Tags",
  find: "Find an effect",
  video: "Video",
  sound: "Audio",
  about: (time: string) => `≈ ${time}`,
  noPreview: (title: string) => `${title}: no preview`,
  shows: (title: string) => `${title}: before and after`,
  signInFirst: "Sign in to see the effects",
  signInText: "Only customers can see effects and prices. Sign in with a customer key.",
  none: "No effects yet",
  noneCustomer: "Effects appear here as soon as an operator publishes them.",
  noneOperator: "Drop a workflow, choose what customers can change, and publish it.",
  addOne: "Publish an effect",
  noMatch: "No matching effects",
  noMatchText: "Try another word, or show all effects.",
  showAll: "Show all",
  found: (count: number) => (count === 1 ? "1 effect" : `${count} effects`),
}
