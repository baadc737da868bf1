import { fileURLToPath } from "node:url"
import react from "@vitejs/plugin-react"
import { defineConfig } from "vite"

// The control plane to which `npm run dev` forwards calls.
const controlPlane = process.env.COMFYFLEET_URL ?? "http://127.0.0.1:8000"
const forwarded = ["/api", "/objects", "/auth", "/editor", "/docs", "/openapi.json", "/healthz", "/readyz"]

export default defineConfig(({ command }) => ({
  // Pages are at the root. Their assets are in a separate folder that no route uses.
  base: command === "build" ? "/web/" : "/",
  plugins: [react()],
  resolve: { alias: { "@": fileURLToPath(new URL("./src", import.meta.url)) } },
  build: {
    outDir: process.env.COMFYFLEET_WEB_OUT ?? "dist",
    emptyOutDir: true,
    assetsDir: "assets",
    manifest: "manifest.json",
    // Fonts and images stay separate files, because the content security policy doesn't allow data:
    // URLs for fonts.
    assetsInlineLimit: 0,
    target: "es2022",
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  server: { proxy: Object.fromEntries(forwarded.map((path) => [path, { target: controlPlane }])) },
}))
