import { Link } from "wouter"
import { Mark } from "@/ui/Icon"
import { words } from "@/words/en/common"

export function Brand({ href }: { href: string }) {
  return (
    <Link href={href} className="brand" aria-label={words.product}>
      <Mark />
      <span className="brand-word">{words.product}</span>
    </Link>
  )
}
