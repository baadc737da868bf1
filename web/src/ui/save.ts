/** Saves content that was created in the browser as a file on the user's machine. */

/** Milliseconds until the object URL is released. Browsers read it some time after the click. */
const URL_MS = 60_000

export function saveFile(content: Blob, name: string): void {
  const link = document.createElement("a")
  link.href = URL.createObjectURL(content)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), URL_MS)
}
