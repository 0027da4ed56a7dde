//! Permission rules: the grammar of `perms`, `create-with-perms` and `chmod-filter`, and their
//! effect on a mode. Pure.
//!
//! `RULE[,RULE...]` (`:` separates as well), applied from left to right. A rule is octal (`0640`:
//! replaces the nine bits) or symbolic: `[ugoafd]*` then one of `= + -` then `[rwxXDstugo]*`.
//! * Left: the classes to change; without one of `ugoa`, all three. `f` and `d` restrict the rule
//!   to non-directories and directories, both or neither mean everything; alone they select no
//!   bits.
//! * Right: `r w x`; `X` is x for directories and where any x bit was set; `D` is x for
//!   directories; `u g o` copy those bits; `s` and `t` are accepted without effect.
//! * Operands (`X u g o`) use the mode before the first rule; bits outside the left side come from
//!   the result of the previous rules.
//! * Set-user-id, set-group-id and sticky never change.
//!
//! The grammar is that of `bindfs(1)`, except that two mistakes which bindfs accepts are errors: a
//! wrong octal digit and a rule without a sign.

use std::{fmt, str::FromStr};

const ALL: u32 = 0o777;

/// A chain of permission rules; the empty chain changes nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Perms(Vec<Rule>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Octal(u32),
    Symbolic(Symbolic),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Symbolic {
    /// The bits that the left side selects: any of 0o700, 0o070, 0o007.
    selected: u32,
    directories: bool,
    others: bool,
    sign: Sign,
    /// `r w x` of the right side, for all three classes.
    fixed: u32,
    /// `X`.
    conditional_x: bool,
    /// `D`.
    directory_x: bool,
    /// Shifts of the classes to copy: u, g, o.
    copies: [bool; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    Set,
    Add,
    Remove,
}

/// Error of a malformed rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermsError {
    rule: String,
    why: &'static str,
}

impl fmt::Display for PermsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "invalid permission rule \"{}\": {}; write octal bits (0640) or a symbolic rule (u=rwX, a-w, g=u)",
            self.rule.escape_debug(),
            self.why
        )
    }
}

impl std::error::Error for PermsError {}

impl FromStr for Perms {
    type Err = PermsError;

    /// Parses rules separated by `,` or `:`. One separator at the end is allowed, an empty rule
    /// elsewhere is not.
    fn from_str(text: &str) -> Result<Perms, PermsError> {
        let rules = text.strip_suffix([',', ':']).filter(|rest| !rest.is_empty()).unwrap_or(text);
        if rules.is_empty() {
            return Ok(Perms::default());
        }
        rules.split([',', ':']).map(parse_rule).collect::<Result<_, _>>().map(Perms)
    }
}

fn parse_rule(rule: &str) -> Result<Rule, PermsError> {
    let bad = |why| PermsError { rule: rule.to_owned(), why };
    match rule.as_bytes() {
        [] => Err(bad("it is empty")),
        [digit, ..] if digit.is_ascii_digit() => parse_octal(rule).map(Rule::Octal).map_err(bad),
        _ => parse_symbolic(rule).map(Rule::Symbolic).map_err(bad),
    }
}

fn parse_octal(rule: &str) -> Result<u32, &'static str> {
    if !rule.bytes().all(|digit| matches!(digit, b'0'..=b'7')) {
        return Err("octal bits have the digits 0 to 7");
    }
    u32::from_str_radix(rule, 8).ok().filter(|&bits| bits <= ALL).ok_or("octal bits go from 0 to 0777")
}

fn parse_symbolic(rule: &str) -> Result<Symbolic, &'static str> {
    let at = rule.find(['=', '+', '-']).ok_or("there is no =, + or - in it")?;
    let (left, right) = rule.split_at(at);
    let mut right = right.chars();
    let sign = match right.next() {
        Some('=') => Sign::Set,
        Some('+') => Sign::Add,
        _ => Sign::Remove,
    };
    let mut parsed = Symbolic {
        selected: 0,
        directories: false,
        others: false,
        sign,
        fixed: 0,
        conditional_x: false,
        directory_x: false,
        copies: [false; 3],
    };
    for letter in left.chars() {
        match letter {
            'u' => parsed.selected |= 0o700,
            'g' => parsed.selected |= 0o070,
            'o' => parsed.selected |= 0o007,
            'a' => parsed.selected |= ALL,
            'f' => parsed.others = true,
            'd' => parsed.directories = true,
            _ => return Err("the letters before the sign are u g o a f d"),
        }
    }
    if left.is_empty() {
        parsed.selected = ALL;
    }
    if parsed.directories == parsed.others {
        (parsed.directories, parsed.others) = (true, true);
    }
    for letter in right {
        operand(&mut parsed, letter)?;
    }
    Ok(parsed)
}

fn operand(parsed: &mut Symbolic, letter: char) -> Result<(), &'static str> {
    let [user, group, other] = &mut parsed.copies;
    match letter {
        'r' => parsed.fixed |= 0o444,
        'w' => parsed.fixed |= 0o222,
        'x' => parsed.fixed |= 0o111,
        'X' => parsed.conditional_x = true,
        'D' => parsed.directory_x = true,
        'u' => *user = true,
        'g' => *group = true,
        'o' => *other = true,
        's' | 't' => {}
        '=' | '+' | '-' => return Err("a rule has one sign only"),
        _ => return Err("the letters behind the sign are r w x X D s t u g o"),
    }
    Ok(())
}

impl Symbolic {
    /// The bits of the right side, for all classes.
    fn bits(&self, original: u32, directory: bool) -> u32 {
        let mut bits = self.fixed;
        if (self.conditional_x && (directory || original & 0o111 != 0)) || (self.directory_x && directory) {
            bits |= 0o111;
        }
        for (copy, shift) in self.copies.into_iter().zip([6, 3, 0]) {
            if copy {
                bits |= ((original >> shift) & 7) * 0o111;
            }
        }
        bits
    }

    fn apply(&self, mode: u32, original: u32, directory: bool) -> u32 {
        if !(if directory { self.directories } else { self.others }) {
            return mode;
        }
        let bits = self.bits(original, directory) & self.selected;
        match self.sign {
            Sign::Set => (mode & !self.selected) | bits,
            Sign::Add => mode | bits,
            Sign::Remove => mode & !bits,
        }
    }
}

impl Perms {
    /// The mode after all rules; bits above the nine stay as they are.
    pub fn apply(&self, mode: u32, directory: bool) -> u32 {
        self.0.iter().fold(mode, |result, rule| match rule {
            Rule::Octal(bits) => (result & !ALL) | bits,
            Rule::Symbolic(rule) => rule.apply(result, mode, directory),
        })
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both(spec: &str) -> (u32, u32) {
        let perms: Perms = spec.parse().unwrap();
        (perms.apply(0o755, true), perms.apply(0o640, false))
    }

    /// Results of bindfs 1.14.7 and 1.18.4 on a directory 755 and a file 640.
    #[test]
    fn every_measured_example_gives_the_same() {
        for (spec, directory, file) in [
            ("640,a+X", 0o751, 0o640),
            ("u=rwX:g=rD:o=", 0o750, 0o640),
            ("g=u", 0o775, 0o660),
            ("a=r,ud+x", 0o544, 0o444),
            ("+r", 0o755, 0o644),
            ("fu=x", 0o755, 0o140),
            ("u+s", 0o755, 0o640),
            ("f=rw", 0o755, 0o640),
            ("a+r:", 0o755, 0o644),
            ("a+r,", 0o755, 0o644),
            ("", 0o755, 0o640),
            ("0640", 0o640, 0o640),
            ("00640", 0o640, 0o640),
            ("000777", 0o777, 0o777),
            ("777:", 0o777, 0o777),
            ("0", 0, 0),
            ("=", 0, 0),
            ("a=", 0, 0),
            ("o=ug", 0o757, 0o646),
            ("df+x", 0o755, 0o640),
            ("uf=", 0o755, 0o040),
            ("u=Xg", 0o555, 0o440),
            ("a=X", 0o111, 0),
            ("a-X", 0o644, 0o640),
            ("g=s", 0o705, 0o600),
        ] {
            assert_eq!(both(spec), (directory, file), "{spec:?}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for spec in [
            ":a+r",
            "a+r,,o=",
            ",",
            "1777",
            "u=rw+x",
            "q+r",
            "a+q",
            "a +r",
            "8",
            "64x",
            "6 40",
            "0o640",
            "-1-",
            "a",
            "u",
            "640,9",
            "a+r::",
            "+\u{e9}",
            "99999999999999999999",
        ] {
            assert!(spec.parse::<Perms>().is_err(), "{spec:?}");
        }
        let error = "a+r:78".parse::<Perms>().unwrap_err().to_string();
        assert!(error.contains("\"78\"") && error.contains("0 to 7"), "{error}");
    }

    #[test]
    fn special_bits_survive() {
        let perms: Perms = "0:a+rwx:u-s".parse().unwrap();
        assert_eq!(perms.apply(0o7000, true), 0o7777);
    }

    proptest! {
        #[test]
        fn any_text_is_answered_without_a_panic(spec in "[ugoafd=+\\-rwxXDst0-9,: ]{0,24}", mode in 0u32..0o10000, directory: bool) {
            if let Ok(perms) = spec.parse::<Perms>() {
                prop_assert_eq!(perms.apply(mode, directory) & !ALL, mode & !ALL);
            }
        }

        #[test]
        fn an_octal_rule_is_its_own_result(bits in 0u32..=0o777, mode in 0u32..0o10000) {
            let perms: Perms = format!("{bits:o}").parse().unwrap();
            prop_assert_eq!(perms.apply(mode, false), bits | (mode & !ALL));
        }
    }
}
