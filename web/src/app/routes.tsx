/** Lists all pages with their addresses and who may see them. A page is loaded when it is first
 * opened.
 *
 * The first segment of a new address must be in PAGES in src/comfyfleet/server/http/web, so that
 * the control plane serves it.
 */

import type { ComponentType } from "react"
import { graphPath, graphRunPath, OFFERS } from "./reads"

export type Shell = "customer" | "console" | "bare"
export type Needs = "customer" | "operator" | "anybody"
// biome-ignore lint/suspicious/noExplicitAny: pages take the parameters of their address
type PageModule = { default: ComponentType<any> }

export interface PageRoute {
  path: string
  shell: Shell
  needs: Needs
  load: () => Promise<PageModule>
  /** The page's code, or null until it has loaded. */
  module: PageModule | null
  /** The page's first requests. */
  reads: Reads
}

type Reads = (params: Readonly<Record<string, string | undefined>>) => readonly string[]

function page(
  path: string,
  shell: Shell,
  needs: Needs,
  load: () => Promise<PageModule>,
  reads: Reads = () => [],
): PageRoute {
  const route: PageRoute = { path, shell, needs, reads, module: null, load: loadOnce }
  async function loadOnce(): Promise<PageModule> {
    route.module ??= await load()
    return route.module
  }
  return route
}

const ofGraph: Reads = ({ id = "" }) => (id === "new" ? [OFFERS] : [OFFERS, graphPath(id)])
const ofGraphRun: Reads = ({ id = "" }) => [OFFERS, graphRunPath(id)]

export const ROUTES: readonly PageRoute[] = [
  page("/", "customer", "anybody", () => import("@/pages/catalogue")),
  page("/sign-in", "bare", "anybody", () => import("@/pages/sign-in")),
  page("/shared/:secret", "bare", "anybody", () => import("@/pages/shared")),
  page("/effects/:slug", "customer", "anybody", () => import("@/pages/effect")),
  page("/results", "customer", "customer", () => import("@/pages/results")),
  page("/results/:id", "customer", "customer", () => import("@/pages/result")),
  page("/media", "customer", "customer", () => import("@/pages/media")),
  page("/media/:id", "customer", "customer", () => import("@/pages/one-media")),
  page("/wallet", "customer", "customer", () => import("@/pages/wallet")),
  page("/keys", "customer", "customer", () => import("@/pages/keys")),
  page("/webhooks", "customer", "customer", () => import("@/pages/webhooks")),
  page("/triggers", "customer", "customer", () => import("@/pages/triggers")),
  page("/account", "customer", "customer", () => import("@/pages/account")),
  page("/graphs", "customer", "customer", () => import("@/pages/graphs")),
  page("/graphs/:id", "bare", "customer", () => import("@/pages/canvas"), ofGraph),
  page("/graphs/:graph/runs", "customer", "customer", () => import("@/pages/graph-runs")),
  page("/graphs/:graph/runs/:id", "bare", "customer", () => import("@/pages/graph-run"), ofGraphRun),
  page("/graph-runs", "customer", "customer", () => import("@/pages/graph-runs")),
  page("/graph-runs/compare", "customer", "customer", () => import("@/pages/graph-compare")),
  page("/graph-runs/:id", "bare", "customer", () => import("@/pages/graph-run"), ofGraphRun),
  page("/pipelines", "customer", "customer", () => import("@/pages/pipelines")),
  page("/pipelines/:slug", "customer", "customer", () => import("@/pages/pipeline")),
  page("/pipelines/:slug/runs/:id", "customer", "customer", () => import("@/pages/pipeline-run")),
  page("/console", "console", "operator", () => import("@/pages/overview")),
  page("/console/queue", "console", "operator", () => import("@/pages/queue")),
  page("/console/jobs", "console", "operator", () => import("@/pages/jobs")),
  page("/console/jobs/:id", "console", "operator", () => import("@/pages/job")),
  page("/console/workers", "console", "operator", () => import("@/pages/workers")),
  page("/console/workers/:id", "console", "operator", () => import("@/pages/worker")),
  page("/console/fleets", "console", "operator", () => import("@/pages/fleets")),
  page("/console/workflows", "console", "operator", () => import("@/pages/workflows")),
  page("/console/workflows/:name", "console", "operator", () => import("@/pages/workflow")),
  page("/console/effects", "console", "operator", () => import("@/pages/effects")),
  page("/console/effects/:slug", "console", "operator", () => import("@/pages/one-effect")),
  page("/console/tenants", "console", "operator", () => import("@/pages/tenants")),
  page("/console/tenants/:id", "console", "operator", () => import("@/pages/tenant")),
  page("/console/audit", "console", "operator", () => import("@/pages/audit")),
  page("/console/settings", "console", "operator", () => import("@/pages/settings")),
]
