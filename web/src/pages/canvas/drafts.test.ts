// @vitest-environment happy-dom
import { afterEach, expect, test, vi } from "vitest"
import { signOut } from "@/api"
import { draftOf, keepDraft } from "./drafts"
import { began } from "./history"

afterEach(() => vi.unstubAllGlobals())

test("signing out removes unsaved drawings", async () => {
  const empty = { document: { name: "Empty", nodes: [], connections: [] }, places: {} }
  const sheet = { ...empty, document: { ...empty.document, name: "Mine" } }
  keepDraft("new", { history: began(sheet), saved: null }, true)
  localStorage.setItem("comfyfleet.theme", "dark")
  expect(draftOf("new", null, empty).history.now.document.name).toBe("Mine")
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(null, { status: 204 })))
  await signOut()
  expect(draftOf("new", null, empty).history.now.document.name).toBe("Empty")
  expect(Object.keys(localStorage)).toEqual(["comfyfleet.theme"])
})
