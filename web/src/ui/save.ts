/** Saves what a page has made as a file of the reader's machine. */

/** Browsers read it after the click. */
const KEPT_MS = 60_000

export function saveFile(content: Blob, name: string): void {
  const link = document.createElement("a")
  link.href = URL.createObjectURL(content)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), KEPT_MS)
}
