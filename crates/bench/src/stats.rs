//! Statistics of a few samples: pure functions used by `summary`, `figures` and the exporters.

/// Middle of the sorted samples, or the mean of the two middle ones; `None` without samples.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    let lower = *sorted.get(sorted.len() / 2 - 1)?;
    Some(lower.midpoint(upper))
}

/// Returns the smallest sample.
pub fn minimum(samples: &[f64]) -> Option<f64> {
    samples.iter().copied().min_by(f64::total_cmp)
}

/// Returns the largest sample.
pub fn maximum(samples: &[f64]) -> Option<f64> {
    samples.iter().copied().max_by(f64::total_cmp)
}

/// Geometric mean, the only mean under which ratios may be averaged; `None` if empty or any value
/// is not positive.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() || values.iter().any(|value| value.is_nan() || *value <= 0.0) {
        return None;
    }
    // The mean of one value is that value, without rounding on the way through logarithms.
    if let [only] = values {
        return Some(*only);
    }
    let count = values.len() as f64;
    Some((values.iter().map(|value| value.ln()).sum::<f64>() / count).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[7.0]), Some(7.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn extremes() {
        assert_eq!(minimum(&[3.0, 1.0, 2.0]), Some(1.0));
        assert_eq!(maximum(&[3.0, 1.0, 2.0]), Some(3.0));
        assert_eq!(minimum(&[]), None);
    }

    #[test]
    fn ratios_average_geometrically() {
        let mean = geometric_mean(&[0.5, 2.0]).unwrap();
        assert!((mean - 1.0).abs() < 1e-12);
        assert_eq!(geometric_mean(&[]), None);
        assert_eq!(geometric_mean(&[1.0, 0.0]), None);
        assert_eq!(geometric_mean(&[1.0, f64::NAN]), None);
    }
}
