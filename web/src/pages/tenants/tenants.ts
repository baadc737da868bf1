/** Helpers for lists of tenants. */

import type { TenantAnswer, UserAnswer } from "@/api/schema"

export type TenantState = "active" | "erasing" | "erased"

export function stateOfTenant(tenant: Pick<TenantAnswer, "erasing_at" | "erased_at">): TenantState {
  if (tenant.erased_at) return "erased"
  return tenant.erasing_at ? "erasing" : "active"
}

/** The icon for each state. */
export const ICONS = { active: "online", erasing: "running", erased: "cancelled" } as const

/** Returns the items whose name contains the text, or whose id starts with it. */
export function matching<Each extends { id: string; name: string }>(
  tenants: readonly Each[],
  text: string,
): readonly Each[] {
  const query = text.trim().toLowerCase()
  if (!query) return tenants
  return tenants.filter(({ id, name }) => name.toLowerCase().includes(query) || id.startsWith(query))
}

/** Checks an email address with the same rule as the control plane. Whether the address exists
 * isn't checked. */
export function isEmail(text: string): boolean {
  return /^[^\s@]+@[^\s@]+$/.test(text.trim())
}

export function nameOfUser(user: Pick<UserAnswer, "id" | "name" | "email">): string {
  return user.name ?? user.email ?? user.id.slice(0, 8)
}
