import { fileURLToPath } from "node:url"
import react from "@vitejs/plugin-react"
import { defineConfig } from "vite"

// The control plane that `npm run dev` passes calls on to.
const plane = process.env.COMFYFLEET_URL ?? "http://127.0.0.1:8000"
const passedOn = ["/api", "/objects", "/auth", "/editor", "/docs", "/openapi.json", "/healthz", "/readyz"]

export default defineConfig(({ command }) => ({
  // Pages are at the root; their files have a folder of their own, which no other route has.
  base: command === "build" ? "/web/" : "/",
  plugins: [react()],
  resolve: { alias: { "@": fileURLToPath(new URL("./src", import.meta.url)) } },
  build: {
    outDir: process.env.COMFYFLEET_WEB_OUT ?? "dist",
    emptyOutDir: true,
    assetsDir: "assets",
    manifest: "manifest.json",
    // Fonts and pictures stay files: the content policy allows no data: address for fonts.
    assetsInlineLimit: 0,
    target: "es2022",
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  server: { proxy: Object.fromEntries(passedOn.map((path) => [path, { target: plane }])) },
}))
