//! Equality of names under folding; and its permanence.
#![allow(clippy::unwrap_used)]

use super::*;

const INSENSITIVE: Folding = Folding { insensitive: true, normal: Normal::None };
const FORM_C: Folding = Folding { insensitive: false, normal: Normal::Canonical };
const FORM_KC: Folding = Folding { insensitive: false, normal: Normal::Compatible };
const ALL: Folding = Folding { insensitive: true, normal: Normal::Compatible };

/// No character from here on has another form or case.
const MAPPED: u32 = 0x3_0000;

#[test]
fn names_are_the_same_as_the_file_system_has_it() {
    let same = |folding: Folding, one: &str, other: &str| folding.same(one.as_bytes(), other.as_bytes());
    for (one, other, insensitive, form_c, form_kc) in [
        ("Makefile", "MAKEFILE", true, false, false),
        ("file 1", "file 2", false, false, false),
        ("\u{c9}t\u{e9}", "\u{e9}T\u{c9}", true, false, false),
        ("\u{e9}", "e\u{301}", false, true, true),
        ("\u{c9}", "e\u{301}", false, false, false),
        ("\u{3a3}", "\u{3c2}", true, false, false),
        // One character is never folded to two: names that are different on Windows are two files.
        ("stra\u{df}e", "strasse", false, false, false),
        ("\u{fb01}", "fi", false, false, true),
        ("\u{ff21}", "A", false, false, true),
        ("\u{212b}", "\u{c5}", true, true, true),
        // Turkish: neither letter equals the i of other languages.
        ("\u{130}", "i", false, false, false),
        ("\u{131}", "I", false, false, false),
    ] {
        assert_eq!(same(INSENSITIVE, one, other), insensitive, "{one} {other}");
        assert_eq!((same(FORM_C, one, other), same(FORM_KC, one, other)), (form_c, form_kc), "{one} {other}");
        assert!(!same(Folding::EXACT, one, other));
        assert!(same(Folding::EXACT, one, one) && same(ALL, one, one));
    }
    assert!(same(ALL, "\u{ff26}\u{fb01}\u{c9}", "ffie\u{301}"));
    let canonical = Folding { insensitive: true, normal: Normal::Canonical };
    assert!(same(canonical, "\u{c9}", "e\u{301}") && !same(canonical, "\u{fb01}", "fi"));
}

#[test]
fn what_is_not_utf_8_is_itself() {
    for folding in [INSENSITIVE, FORM_C, ALL] {
        assert_eq!(*folding.fold(b"A\xff"), *b"A\xff");
        assert!(!folding.same(b"A\xff", b"a\xff"));
    }
}

#[test]
fn folding_twice_changes_nothing_and_case_is_a_function_of_one_character() {
    let mut before = 0;
    for (first, last, step, _) in case::runs() {
        assert!(*first > before && last >= first && matches!(step, 1 | 2), "{first:#x}");
        before = *last;
    }
    for of in (0..MAPPED).filter_map(char::from_u32) {
        let folded = case::fold(of);
        assert_eq!(case::fold(folded), folded, "{of:?}");
        let mut text = [0; 4];
        let name = of.encode_utf8(&mut text).as_bytes();
        for folding in [INSENSITIVE, FORM_C, FORM_KC, ALL] {
            let once = folding.fold(name).into_owned();
            assert_eq!(*folding.fold(&once), *once, "{of:?}");
        }
    }
}

/// Pools store hashes of folded names: the sum checked here is part of their format. If this fails,
/// a library has other tables: it must not be used.
#[test]
fn tables_are_those_of_the_format() {
    assert_eq!(unicode_normalization::UNICODE_VERSION, (16, 0, 0));
    let sums = [INSENSITIVE, FORM_C, FORM_KC, ALL].map(|folding| {
        let mut all = Vec::new();
        for of in (0..MAPPED).filter_map(char::from_u32) {
            let mut text = [0; 4];
            all.extend_from_slice(&folding.fold(of.encode_utf8(&mut text).as_bytes()));
            all.push(0);
        }
        // Combining characters of every class in a sequence, for their order.
        let marks: String = (0x300..0x1f00).filter_map(char::from_u32).rev().collect();
        all.extend_from_slice(&folding.fold(marks.as_bytes()));
        xxhash_rust::xxh3::xxh3_64(&all)
    });
    assert_eq!(
        sums,
        [2_125_942_505_001_004_050, 12_715_212_372_459_592_910, 8_180_756_043_091_075_536, 11_248_500_924_543_434_495]
    );
}

#[test]
fn heads_hold_it_in_a_byte() {
    for byte in 0..=255 {
        if let Some(folding) = Folding::of_byte(byte) {
            assert_eq!(folding.byte(), byte);
        }
    }
    assert_eq!((0..=255).filter_map(Folding::of_byte).count(), 6);
    assert_eq!(Folding::of_properties("mixed", "none"), Folding::EXACT);
    assert_eq!(Folding::of_properties("insensitive", "formKD"), ALL);
    assert_eq!(Folding::of_properties("sensitive", "formD"), FORM_C);
}
